"""checkpoints/best.ckpt and checkpoints/last.ckpt in the run folder."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

import leyden
from leyden.callbacks.agreement import Agreement
from leyden.errors import ConfigError, TrainingError


class Checkpoint(LightningCheckpoint):
    """Keeps the best and the last states under fixed names that need no quoting on a command line.

    The state is saved at the end of every epoch, and within it after `every_n_steps` steps, after `every_n_minutes`
    minutes, and when the run is told to stop. Epochs shorter than `min_interval_s` share a write, so that a run does
    not write more than it trains; a better state waits in memory for it. A checkpoint holds tensors and plain values
    only, so that it loads with `weights_only=True`, and under the key "leyden" the resolved config and the metrics at
    that moment.

    Args:
        monitor: metric that decides which state is the best; null keeps the last states only.
        mode: "min" or "max".
        every_n_steps: optimiser steps between two states within an epoch; null saves at its end only.
        every_n_minutes: minutes after which the state is saved within an epoch; null for no such limit.
        min_interval_s: seconds from one state written at the end of an epoch to the next; 0 writes every one. The last
            epoch's is always written.
        keep: last states to keep, `last.ckpt`, `last-1.ckpt`, ...; a damaged one is then replaced by the one before.
    """

    def __init__(
        self,
        monitor: str | None,
        mode: Literal["min", "max"],
        every_n_steps: Annotated[int, Ge(1)] | None = None,
        every_n_minutes: Annotated[float, Gt(0)] | None = None,
        min_interval_s: Annotated[float, Ge(0)] = 10.0,
        keep: Annotated[int, Ge(1)] = 2,
    ) -> None:
        self.monitor = monitor
        self.mode = mode
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.min_interval_s = min_interval_s
        self.keep = keep
        # Whether the run is about to stop, so that the end of an epoch must not go without a state
        self.hurries = False
        self.config: dict[str, Any] = {}
        self.folder = Path()
        self.best_score: float | None = None
        self.saved_step = -1
        self._saved_at = time.monotonic()
        self._is_due = False
        self._agreement = Agreement("save")
        self._has_written = False
        self._has_validated = False
        self._validation_pending = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes the folder before any work is done.

        Raises:
            TrainingError: when nothing can be written there.
        """
        self.folder = Path(trainer.default_root_dir) / "checkpoints"
        if stage != "fit" or not trainer.is_global_zero:
            return
        probe = self.folder / ".probe.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"a checkpoint can be written here")
            for left_over in self.folder.glob(".*.tmp"):  # of a run that was killed while it wrote; and the probe
                left_over.unlink()
        except OSError as err:
            raise TrainingError(
                f"Checkpoints cannot be written to {self.folder.absolute()}: {err.strerror}. "
                "Make the folder writable (permission, space), or choose another with paths.outputs=FOLDER."
            ) from err

    # ---- when to save --------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps_in_epoch = getattr(pl_module, "steps_in_epoch", lambda index: index + 1)(batch_idx)
        self._is_due |= self.every_n_steps is not None and steps_in_epoch % self.every_n_steps == 0
        if self.every_n_minutes is not None:
            has_passed = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
            self._is_due |= self._agreement.decide(1 if has_passed else None) is not None
        # A state before a validation would resume after it; it waits until the validation has been
        if self._is_due and is_between_batches(trainer, batch_idx):
            self.save(trainer)
        elif trainer.should_stop and batch_idx + 1 < trainer.num_training_batches:
            self.save(trainer)  # trainer.max_steps within an epoch, which more steps would go on with

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._has_validated = True
        if not self._is_at_end_of_epoch(trainer):  # where all is known only then
            self._save_better(trainer, always=trainer.should_stop)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_at_end_of_epoch(trainer) or self.saved_step != trainer.global_step:
            self._save_better(trainer, always=True)
        elif self._notes_better(trainer):  # trainer.max_steps within an epoch: last.ckpt goes on in the middle of it
            trainer.save_checkpoint(self.folder / "best.ckpt", weights_only=False)

    @staticmethod
    def _is_at_end_of_epoch(trainer: Trainer) -> bool:
        return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.saved_step != trainer.global_step:
            self.save(trainer)
        wait = getattr(trainer.strategy.checkpoint_io, "wait", None)
        if wait is not None:
            wait()  # what could not be written must not look like a good end

    def _save_better(self, trainer: Trainer, always: bool = False) -> None:
        recent = self._has_written and time.monotonic() - self._saved_at < self.min_interval_s
        rests = trainer.strategy.broadcast(recent and not self._is_due and not self.hurries)
        if self._notes_better(trainer):
            self.save(trainer, as_best=True, hold=rests)
        elif self._is_due or (always and not rests):
            self.save(trainer)

    def _notes_better(self, trainer: Trainer) -> bool:
        score = self._score(trainer)
        if score is None or not self._is_better(score):
            return False
        self.best_score = score
        return True

    def _score(self, trainer: Trainer) -> float | None:
        if self.monitor is None:
            return None
        if self.monitor in trainer.callback_metrics:
            return float(trainer.callback_metrics[self.monitor])
        if self.monitor.startswith("val/") and not self._has_validated:
            return None
        raise ConfigError(
            f"`callbacks.checkpoint.monitor` is {self.monitor}, which is not measured. "
            f"There are {', '.join(sorted(trainer.callback_metrics)) or 'no metrics'}. Set objective.metric to one."
        )

    def _is_better(self, score: float) -> bool:
        if not math.isfinite(score):
            return False
        return self.best_score is None or (score < self.best_score if self.mode == "min" else score > self.best_score)

    # ---- saving --------------------------------------------------------------------------------------------

    def save(
        self, trainer: Trainer, as_best: bool = False, validation_pending: bool = False, hold: bool = False
    ) -> None:
        """Saves the state as last.ckpt, and with `as_best` as best.ckpt.

        Args:
            trainer: of the run.
            as_best: whether this is the best state so far.
            validation_pending: whether the validation that is going on has to be done again after this state.
            hold: whether the state may wait in memory until the next is written.
        """
        self.saved_step = trainer.global_step
        self._validation_pending = validation_pending
        options = {"keep": self.keep, "also": self.folder / "best.ckpt" if as_best else None, "hold": hold}
        trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False, storage_options=options)
        self._validation_pending = False
        if not hold:
            self._is_due = False
            self._has_written = True
            self._saved_at = time.monotonic()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()  # a resumed run goes on from what the logs say of the steps up to here
        if self._validation_pending:
            # What Lightning takes as the mark of a validation that has to be finished; it starts from its beginning.
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            nothing = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
            progress |= {"total": {**nothing, "ready": 1, "started": 1}, "current": nothing, "is_last_batch": False}
        checkpoint["leyden"] = {
            "version": leyden.__version__,
            "config": self.config,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "num_threads": torch.get_num_threads(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]

    @property
    def path_to_test(self) -> Path:
        """The checkpoint that a run tests: the best, or the last where there is no best."""
        return self.folder / ("last.ckpt" if self.best_score is None else "best.ckpt")


def is_between_batches(trainer: Trainer, batch_idx: int) -> bool:
    """Whether another batch of the epoch follows this one at once, without a validation or the epoch's end between."""
    validate_every = trainer.val_check_batch
    is_last = batch_idx + 1 >= trainer.num_training_batches
    validates = validate_every not in (None, math.inf) and (batch_idx + 1) % validate_every == 0
    return not (is_last or validates or trainer.should_stop)
