"""Callbacks that measure a run of Leyden or of plain Lightning from inside."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from benchmarks.clock import EpochClock, write_stamp


class EpochTimer(Callback):
    """Writes the time of each epoch: training with its logging and checkpoint, and validation apart.

    Args:
        path: JSON file to write.
        warmup_epochs: epochs at the start that do not count.
        profile: file for a cProfile of the epochs that count; null for none.
    """

    def __init__(self, path: str, warmup_epochs: int = 1, profile: str | None = None) -> None:
        self.path = path
        self.clock = EpochClock(warmup_epochs, profile)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.start_epoch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.resume()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The last checkpoint is written by now: Leyden waits for it in `on_train_end`.
        self.clock.finish()
        loader: Any = trainer.train_dataloader
        per_item = getattr(loader, "batches_per_item", None)
        batches = getattr(loader, "num_batches", trainer.num_training_batches)
        self.clock.write(self.path, num_batches=batches, facts={"batches_per_call": per_item or 1})


class FirstStep(Callback):
    """Writes when the first optimiser step begins, and ends the process there.

    Args:
        path: JSON file to write.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        write_stamp(self.path)
        os._exit(0)
