"""Progress on the terminal: a live bar for people, a bounded number of lines for files."""

from __future__ import annotations

import logging
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from leyden.data.ranks import data_size

log = logging.getLogger(__name__)

MAX_LINES = 20


class Progress(ProgressBar):
    """One bar over all optimiser steps of the run with loss, metrics, samples per second and time left.

    Where the output is not a terminal, a line per epoch instead, at most about 20 of them.
    The numbers shown are those last read for logging, so showing them costs no device synchronisation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._console = Console()
        self._bar: RichProgress | None = None
        self._task_id: Any = None
        self._num_samples = 0
        self._rate = 0.0
        self._finished_epoch = 0
        self._epoch_start = 0.0
        self._validation_seconds = 0.0

    def disable(self) -> None:
        self._stop()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (self._console.is_terminal and trainer.is_global_zero):
            return
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=2,
        )
        self._bar.start()
        self._task_id = self._bar.add_task("epoch 1", total=_total_steps(trainer, pl_module), numbers="")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The numbers of an epoch are complete only after all callbacks have seen its end.
        self._print_line(trainer, pl_module)
        self._epoch_start = time.perf_counter()
        self._validation_seconds = 0.0
        self._num_samples = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_samples += _num_samples(batch) * data_size(trainer)
        if self._bar is not None:
            self._bar.update(
                self._task_id,
                completed=trainer.global_step,
                description=f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs or '?'}",
                numbers=self._numbers(pl_module, self._num_samples / self._seconds(), short=True),
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_seconds -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_seconds += time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished_epoch = trainer.current_epoch + 1
        self._rate = self._num_samples / self._seconds()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_line(trainer, pl_module)
        self._stop()

    def _print_line(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch, total = self._finished_epoch, trainer.max_epochs or 0
        self._finished_epoch = 0
        every = max(1, -(-total // MAX_LINES))
        if not epoch or self._bar is not None or not trainer.is_global_zero:
            return
        if epoch % every == 0 or epoch in (1, total):
            log.info("epoch %d/%s  %s", epoch, total or "?", self._numbers(pl_module, self._rate))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _seconds(self) -> float:
        """Training time of this epoch so far, without validation."""
        return max(1e-9, time.perf_counter() - self._epoch_start - self._validation_seconds)

    @staticmethod
    def _numbers(pl_module: LightningModule, rate: float, short: bool = False) -> str:
        latest: dict[str, float] = getattr(pl_module, "latest", {})
        shown = sorted(latest.items(), key=lambda item: item[0] != "loss")
        if short:  # one metric leaves room for the bar
            shown = shown[:2]
        return "  ".join([*(f"{name} {value:.4g}" for name, value in shown), f"{rate:,.0f} samples/s"])


def _total_steps(trainer: Trainer, pl_module: LightningModule) -> float | None:
    """Optimiser steps of the whole run, or None where that is not known."""
    count_steps = getattr(pl_module, "count_steps", None)
    if callable(count_steps):
        return float(count_steps())
    total = trainer.estimated_stepping_batches
    return None if total == float("inf") else total


def _num_samples(batch: Any) -> int:
    """Samples in a batch, or in several."""
    if hasattr(batch, "num_samples"):
        return int(batch.num_samples)
    if isinstance(batch, list) and batch and isinstance(batch[0], dict):
        return sum(map(_num_samples, batch))
    if isinstance(batch, dict):
        return len(next(iter(batch.values())))
    return len(batch[0] if isinstance(batch, list | tuple) else batch)
