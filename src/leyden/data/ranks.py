"""This process among those that share the samples; processes that hold parts of one network take the same ones."""

from __future__ import annotations

from lightning.pytorch import Trainer


def data_rank(trainer: Trainer) -> int:
    """Which part of each batch this process takes, from 0."""
    return _sampler_arguments(trainer)["rank"]


def data_size(trainer: Trainer) -> int:
    """How many parts each batch is cut into."""
    return _sampler_arguments(trainer)["num_replicas"]


def _sampler_arguments(trainer: Trainer) -> dict[str, int]:
    """What strategies of several processes say of how samples are shared."""
    found: dict[str, int] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return found or {"num_replicas": 1, "rank": 0}
