"""Randomness inside the step (dropout), as a function of the position and not of what ran before."""

from __future__ import annotations

import torch

from leyden.data.order import derive_seed

CPU = torch.device("cpu")


def seed_step(seed: int, step: int, micro_batch: int = 0, rank: int = 0, device: torch.device = CPU) -> None:
    """Seeds the global generators of the CPU and of `device` for one micro-batch of one optimiser step on one rank.

    Not by `torch.manual_seed`: where there is no CUDA, it notes the call with its whole stack for three kinds of
    devices that may come later, which costs more than a small step and is never freed (torch 2.14).
    """
    value = derive_seed(seed, "step", step, micro_batch, rank)
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)
