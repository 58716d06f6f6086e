"""What a training epoch has added up so far, for a checkpoint in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torchmetrics import Metric, MetricCollection

# Loss of a part, its samples, and what the metrics take: seen, but not yet added up.
Seen = list[tuple[Any, ...]]


def save_epoch(trainer: Trainer, metrics: nn.ModuleDict, seen: Seen, num_seen_elements: int) -> list[dict[str, Any]]:
    """The sums of all metrics and what is not yet added to them, one entry per process.

    What is seen but not added up is kept as it is: adding it now would change the order of the sums, and so their last
    bits.
    """
    own = {
        "metrics": {
            name: {
                "updates": metric.update_count,
                "state": {key: _copy(value) for key, value in metric.metric_state.items()},
            }
            for name, metric in named_metrics(metrics)
        },
        "seen": [list(part) for part in seen],
        "num_seen_elements": num_seen_elements,
    }
    if trainer.world_size == 1:
        return [own]
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def load_epoch(trainer: Trainer, metrics: nn.ModuleDict, saved: list[dict[str, Any]]) -> tuple[Seen, int]:
    """Lets the metrics go on from what `save_epoch` gave, and returns what is seen and the number of its elements.

    With as many processes as before each takes its own sums; otherwise the first takes all of them.
    """
    if len(saved) == trainer.world_size:
        saved = [saved[trainer.global_rank]]
    elif trainer.global_rank > 0:
        return [], 0
    for name, metric in named_metrics(metrics):
        for part in saved:
            state = part["metrics"][name]["state"]
            if part["metrics"][name]["updates"] == 0:
                continue
            if metric.update_count:
                metric.merge_state({key: _copy(value) for key, value in state.items()})
            else:
                for key, value in state.items():
                    setattr(metric, key, _copy(value))
            # Without this torchmetrics would warn of a metric that was never updated
            metric._update_count += part["metrics"][name]["updates"]
            metric._computed = None
    seen = [tuple(entry) for part in saved for entry in part["seen"]]
    return seen, sum(part["num_seen_elements"] for part in saved)


def named_metrics(modules: nn.ModuleDict) -> Iterator[tuple[str, Metric]]:
    """Each metric with its path; those of a collection by themselves."""
    for name, module in modules.items():
        if isinstance(module, MetricCollection):
            for key, metric in module.items(keep_base=True, copy_state=False):
                yield f"{name}.{key}", metric
        elif isinstance(module, Metric):
            yield name, module


def _copy(value: Any) -> Any:
    return [element.detach().clone() for element in value] if isinstance(value, list) else value.detach().clone()
