"""What a training epoch has added up so far, for a checkpoint in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from leyden.data.ranks import data_rank, data_size

# Outputs of training are kept for the metrics up to this many numbers (16 MiB in float32).
MAX_SEEN_ELEMENTS = 2**22


class MeanLoss(MeanMetric):
    """A mean over rows that keeps NaN (a run must not go on as if nothing were) and does not look for it at every step.

    torchmetrics' own update drops the weights where NaN is not looked for (1.9.0).
    """

    def __init__(self) -> None:
        super().__init__(nan_strategy="disable")

    def update(self, value: float | Tensor, weight: Any = 1) -> None:
        """Adds the mean loss `value` of `weight` rows; several of them as tensors of one shape."""
        self.mean_value += (torch.as_tensor(value).to(self.mean_value.dtype) * weight).sum()
        self.weight += torch.as_tensor(weight).sum()


class Seen:
    """Micro-batches that were trained on, but are not yet added to the metrics.

    An update costs as much as a small step, so they are added when the loss is read, or when they are many. Neither
    depends on how many steps a call takes, so sums are added in the same order and give the same bits.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []
        self._num_elements = 0

    def add(self, loss: Tensor, length: int, outputs: Tensor, targets: Tensor) -> None:
        """Takes the mean loss of `length` rows and what the metrics take."""
        self._parts.append((loss, length, outputs, targets))
        self._num_elements += outputs.numel()

    def __len__(self) -> int:
        return len(self._parts)

    def cut(self, length: int) -> None:
        """Forgets what came after the first `length` micro-batches."""
        self.load([list(part) for part in self._parts[:length]])

    @property
    def is_full(self) -> bool:
        """Whether they should be added now, before they take much memory."""
        return self._num_elements > MAX_SEEN_ELEMENTS

    def take(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """All losses, lengths, outputs and targets, which are then no longer here; None where there are none."""
        if not self._parts:
            return None
        losses, lengths, outputs, targets = zip(*self._parts, strict=True)
        self.load([])
        weights = torch.tensor(lengths, device=losses[0].device)
        return torch.stack(losses), weights, torch.cat(outputs), torch.cat(targets)

    def state(self) -> list[list[Any]]:
        """For a checkpoint."""
        return [list(part) for part in self._parts]

    def load(self, state: list[list[Any]], device: torch.device | None = None) -> None:
        """Goes on from what `state` gave."""
        self._parts = [tuple(v.to(device or v.device) if isinstance(v, Tensor) else v for v in part) for part in state]
        self._num_elements = sum(part[2].numel() for part in self._parts)


def save_epoch(trainer: Trainer, metrics: nn.ModuleDict, seen: Seen) -> list[dict[str, Any]]:
    """The sums of all metrics and what is not yet added to them, one entry per part of a batch.

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
        "seen": seen.state(),
    }
    if data_size(trainer) == 1:
        return [own]
    gathered: list[Any] = [None] * data_size(trainer)
    torch.distributed.all_gather_object(gathered, own, group=next(named_metrics(metrics))[1].process_group)
    return gathered


def load_epoch(trainer: Trainer, metrics: nn.ModuleDict, seen: Seen, saved: list[dict[str, Any]]) -> None:
    """Lets the metrics and what is seen go on from what `save_epoch` gave.

    With batches in as many parts as before each process takes its own sums; otherwise the first takes all of them.
    """
    if len(saved) == data_size(trainer):
        saved = [saved[data_rank(trainer)]]
    elif data_rank(trainer) > 0:
        return
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
    seen.load([entry for part in saved for entry in part["seen"]], trainer.strategy.root_device)


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
