"""checkpoints/best.ckpt and checkpoints/last.ckpt in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import leyden


class Checkpoint(ModelCheckpoint):
    """Keeps the best and the last state under fixed names that need no quoting on a command line.

    A checkpoint holds tensors and plain values only, so that it loads with `weights_only=True`, and under the
    key "leyden" the resolved config and the metrics at that moment.

    Args:
        monitor: metric that decides; null keeps the last state only.
        mode: "min" or "max".
    """

    CHECKPOINT_NAME_LAST = "last"

    def __init__(self, monitor: str | None, mode: Literal["min", "max"]) -> None:
        super().__init__(
            monitor=monitor,
            mode=mode,
            filename="best" if monitor else "last",
            save_top_k=1,
            save_last=monitor is not None,
            auto_insert_metric_name=False,
            enable_version_counter=False,
            # At the end of an epoch all its values are known, so that a resumed run starts with the next one.
            save_on_train_epoch_end=True,
        )
        self.config: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)
        if trainer.val_check_interval not in (None, 1.0) and (self.monitor or "").startswith("val/"):
            self._save_on_train_epoch_end = False  # there are validations within an epoch

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        # Lightning 2.6 writes last.ckpt only where it has just written a new best; with this it does each time.
        self._last_global_step_saved = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Training may end between two validations, e.g. at trainer.max_steps.
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()  # a resumed run goes on from what the logs say of the steps up to here
        checkpoint["leyden"] = {
            "version": leyden.__version__,
            "config": self.config,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "batches_per_item": getattr(trainer.datamodule, "batches_per_item", None),  # type: ignore[attr-defined]
        }

    @property
    def path_to_test(self) -> str:
        """The checkpoint that a run tests: the best, or the last where nothing is monitored."""
        return self.best_model_path or self.last_model_path
