"""Optimisers that torch has only in parts. The others are torch's own, named in conf/optim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Muon for the matrices inside a network, AdamW for everything else, as one optimiser.

    Muon is defined for the weight matrices of hidden layers only. Parameters that are not matrices, and those
    with one of the words of `adamw_names` in their name (embeddings, output layers), go to AdamW.

    Args:
        params: named parameters.
        lr: of Muon; its updates are rescaled to the size of AdamW's, so that usual rates for AdamW fit.
        weight_decay: decoupled, for both.
        momentum: of Muon.
        adamw_lr: of AdamW; null takes `lr`.
        adamw_names: words that mark a parameter for AdamW.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; both parts are torch.optim's.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: Annotated[float, Gt(0)] = 1e-3,
        weight_decay: Annotated[float, Ge(0)] = 0.1,
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.95,
        adamw_lr: Annotated[float, Gt(0)] | None = None,
        adamw_names: Sequence[str] = ("embed", "head"),
    ) -> None:
        named = list(params)
        matrices = [p for n, p in named if p.ndim == 2 and not any(word in n for word in adamw_names)]
        others = [p for n, p in named if not any(p is matrix for matrix in matrices)]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(
                    matrices,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=adamw_lr or lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Lets the parts work on this optimiser's groups and state, which schedules and checkpoints see."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = defaultdict(dict, self.state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both parts; `closure` is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def build_optimizer(factory: Callable[..., torch.optim.Optimizer], module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimiser over the trainable parameters of a module, which it knows by name."""
    return factory([(name, p) for name, p in module.named_parameters() if p.requires_grad])


def take_up(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]] | None) -> None:
    """Fits an optimiser, whose state may be a checkpoint's, to the run.

    Args:
        optimizer: its state gets the memory layout of its parameters. A checkpoint brings the layout it was written
            with, and fused optimisers go through the memory of both side by side without a look at it (torch 2.14).
        settings: of each parameter group (rate, weight decay, ...), where those of the checkpoint do not count.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    for group, new in zip(optimizer.param_groups, settings or [{}] * len(optimizer.param_groups), strict=True):
        group.update(new)
