"""An exponential moving average of a network's weights, which is validated, tested and saved in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from leyden.sharding import own_part, split_like, whole_of_part

KEY = "ema"  # in a checkpoint: which weights `state_dict` has, and those of the last step where it has the average


class WeightAverage:
    """Averages the parameters of a network over optimiser steps; buffers (running statistics) are not averaged.

    After each step `average = decay * average + (1 - decay) * weights`, from the first step after `start_step` on,
    whose weights are the first average. It is one fused call without a device synchronisation (torch's AveragedModel
    reads a counter from the device at each step, and copies the network). For bfloat16 weights it is in float32.

    Args:
        net: the network; its parameters stay the same objects, so that optimisers keep them.
        decay: share of the average that a step keeps.
        start_step: optimiser steps before there is an average.
    """

    def __init__(self, net: nn.Module, decay: float, start_step: int) -> None:
        self.net = net
        self.start_step = start_step
        self._mix = get_ema_multi_avg_fn(decay)
        self._average: list[Tensor] | None = None
        self._raw: list[Tensor] | None = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after an optimiser step (from 1)."""
        if step <= self.start_step:
            return
        weights = self._weights()
        if self._average is None:
            self._average = [w.clone(memory_format=torch.preserve_format) for w in weights]
        else:
            self._move()
            self._mix(self._average, weights, 0)

    def _weights(self) -> list[Tensor]:
        return [p.float() if p.dtype in (torch.bfloat16, torch.float16) else p for p in self._params()]

    def _params(self) -> list[Tensor]:
        """The parameters, of which a process may hold parts only; an average needs no more."""
        return [own_part(p) for p in self.net.parameters()]

    def _move(self) -> None:
        """To the network's device, after a checkpoint was loaded."""
        params = self._params()
        if self._average and self._average[0].device != params[0].device:
            self._average = [a.to(p.device) for a, p in zip(self._average, params, strict=True)]

    @torch.no_grad()
    def swap_in(self) -> None:
        """Puts the average into the network, if there is one yet."""
        if self._average is None or self._raw is not None:
            return
        self._move()
        params = self._params()
        self._raw = [p.detach().clone(memory_format=torch.preserve_format) for p in params]
        torch._foreach_copy_(params, self._average)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Puts the weights of the last step back, bit for bit."""
        if self._raw is not None:
            torch._foreach_copy_(self._params(), self._raw)
            self._raw = None

    def save(self, checkpoint: dict[str, Any], prefix: str = "net.") -> None:
        """Lets a checkpoint's `state_dict` have the average, and keeps the weights of the last step beside it."""
        checkpoint[KEY] = {"weights": "raw"}
        if self._average is None:
            return
        raw = self._raw or self._params()
        checkpoint[KEY] = {"weights": "ema", "raw": dict(self._named(raw, prefix))}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **dict(self._named(self._average, prefix))}

    def load(self, checkpoint: dict[str, Any], prefix: str = "net.") -> None:
        """Takes the average over from a checkpoint with which training goes on; call it before `take_raw`."""
        self._raw = None
        self._average = None
        if checkpoint.get(KEY, {}).get("weights") == "ema":
            names = {id(p): f"{prefix}{name}" for name, p in self.net.named_parameters()}
            # Copies: the originals are those that the network is loaded from
            saved = checkpoint["state_dict"]
            self._average = [own_part(split_like(saved[names[id(p)]], p)).clone() for p in self.net.parameters()]

    def _named(self, values: list[Tensor], prefix: str) -> list[tuple[str, Tensor]]:
        """Values of the parameters under all their names, as shared parameters have several."""
        params = list(self.net.parameters())
        by_id = {id(p): whole_of_part(value, p) for p, value in zip(params, values, strict=True)}
        return [(f"{prefix}{name}", by_id[id(p)]) for name, p in self.net.named_parameters(remove_duplicate=False)]


def take_raw(checkpoint: dict[str, Any]) -> None:
    """Lets training go on from the weights of the last step, whether or not it goes on averaging."""
    checkpoint["state_dict"] = {**checkpoint["state_dict"], **checkpoint.get(KEY, {}).get("raw", {})}
