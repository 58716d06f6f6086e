"""torch.compile for a task's network: in its place, so that its weights keep their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from leyden.errors import ConfigError

log = logging.getLogger(__name__)

INSTEAD = "Use engine.compile=off."


def compile_net(net: nn.Module, mode: str, accelerator: str) -> None:
    """Lets a network be compiled when it is first called.

    One graph serves batches of all sizes (`dynamic`): a graph per size would be chosen by what ran before, so that a
    resumed run would differ in the last bits. Random numbers are those of a network that is not compiled.

    Args:
        net: the network; it stays the same object.
        mode: torch.compile's; "off" leaves the network as it is.
        accelerator: the kind of device it will be on.

    Raises:
        ConfigError: when code for this device cannot be made here.
    """
    if mode == "off":
        return
    reason = find_obstacle(accelerator)
    if reason:
        raise ConfigError(f"`engine.compile` is {mode}, but nothing can be compiled here: {reason}. {INSTEAD}")
    if mode == "reduce-overhead" and accelerator != "cuda":
        log.warning("engine.compile=reduce-overhead is the same as default on %s: CUDA graphs need a GPU.", accelerator)
    net.compile(dynamic=True, **compile_arguments(mode))


def compile_arguments(mode: str) -> dict[str, Any]:
    """A mode as arguments of torch.compile, which takes no options beside a mode."""
    from torch._inductor import list_mode_options

    return {"backend": "inductor", "options": {**list_mode_options(mode), "fallback_random": True}}


def keep_gradients(backward: Callable[[Tensor], None], weights: Sequence[Tensor]) -> Callable[[Tensor], None]:
    """A backward pass after which the gradients are not in memory that the next call of a CUDA graph takes again.

    Needed where several micro-batches add up their gradients.
    """

    def backward_and_keep(loss: Tensor) -> None:
        backward(loss)
        for weight in weights:
            if weight.grad is not None:
                weight.grad = weight.grad.clone()

    return backward_and_keep


def find_obstacle(accelerator: str) -> str | None:
    """Why torch.compile cannot make code for a device; None where it can."""
    import torch._dynamo
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if not torch._dynamo.is_dynamo_supported():
        return "torch.compile does not work with this version of Python or torch"
    if accelerator == "cuda" and not has_triton():
        return "Triton is missing, or the GPU is too old for it (compute capability below 7.0)"
    if accelerator == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler (install g++ or clang, or name one in the variable CXX)"
    return None


def explain_failure(err: Exception, net: nn.Module) -> ConfigError | None:
    """What to say of an error of the first step where it comes from compiling; None for another error."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(err, TorchDynamoException):
        return None
    text = str(getattr(err, "inner_exception", None) or err.__cause__ or err).strip()
    reason = text.splitlines()[0] if text else type(err).__name__
    return ConfigError(
        f"`engine.compile`: torch.compile fails on `model.net` ({type(net).__name__}): {reason}. {INSTEAD}"
    )
