"""Randomness inside the step (dropout), as a function of the position and not of what ran before."""

from __future__ import annotations

import torch

from leyden.data.order import derive_seed


def seed_step(seed: int, step: int, micro_batch: int = 0, rank: int = 0) -> None:
    """Seeds torch's global generators for one micro-batch of one optimiser step on one rank."""
    torch.manual_seed(derive_seed(seed, "step", step, micro_batch, rank))
