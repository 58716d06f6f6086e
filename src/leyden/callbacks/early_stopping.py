"""A stop when the objective no longer improves."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from annotated_types import Ge
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

log = logging.getLogger(__name__)


class EarlyStopping(LightningEarlyStopping):
    """Stops training after `patience` validations without an improvement, and says so.

    Args:
        monitor: metric that must improve.
        mode: "min" or "max".
        patience: validations without an improvement before the stop.
        min_delta: smallest change that counts as one.
    """

    def __init__(
        self,
        monitor: str,
        mode: Literal["min", "max"],
        patience: Annotated[int, Ge(1)] = 10,
        min_delta: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, patience=patience, min_delta=min_delta, strict=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopping_reason_message is None:  # not stopped_epoch, which is 0 for the first epoch as well
            return
        epoch = self.stopped_epoch + 1
        if self.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC:
            log.warning("Stopped early after epoch %d: %s is not finite.", epoch, self.monitor)
        else:
            log.info(
                "Stopped early after epoch %d: %s did not improve on %.6g for %d validations.",
                epoch,
                self.monitor,
                float(self.best_score),
                self.patience,
            )
