"""What CUDA does otherwise than the CPU in the operators of a step, as far as it changes how much memory they keep.

A step is traced on the CPU's operators, since autograd does not run CUDA's without a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# What torch.autocast runs in float32 on CUDA; most of it stays in the smaller format on the CPU.
# Source: "CUDA Ops that can autocast to float32", https://docs.pytorch.org/docs/stable/amp.html
FLOAT32_OPERATORS = frozenset(
    {
        "__pow__",
        "__rdiv__",
        "__rpow__",
        "__rtruediv__",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cosh",
        "cosine_embedding_loss",
        "cdist",
        "cosine_similarity",
        "cross_entropy",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log_softmax",
        "log1p",
        "log2",
        "margin_ranking_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "renorm",
        "tan",
        "triplet_margin_loss",
    }
)
SMALL_FORMATS = (torch.bfloat16, torch.float16)


class CudaOperators(TorchFunctionMode):
    """Lets operators on CPU tensors keep what they would keep on CUDA.

    - Group normalisation copies what is laid out channels last, and gives the usual layout.
    - Dropout keeps a mask of bytes, not of numbers.
    - Attention with dropout stays one operator that keeps no matrix of weights.
    - With autocast, normalisations, softmax, sums and losses compute in float32.

    Args:
        autocasts: whether the step runs under autocast.
    """

    def __init__(self, autocasts: bool) -> None:
        super().__init__()
        self.autocasts = autocasts

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], {**kwargs, **dict(zip(("is_causal",), args[5:], strict=False)), "dropout_p": 0.0}
        elif func is F.multi_head_attention_forward:  # of nn.MultiheadAttention
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif self.autocasts and name in FLOAT32_OPERATORS:
            args, kwargs = tree_map(_widen, (args, kwargs))
        if name == "group_norm":
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    output: Tensor = torch.native_dropout(input, p, training)[0]
    return input.copy_(output) if inplace else output


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SMALL_FORMATS else value
