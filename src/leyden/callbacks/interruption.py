"""Ctrl-C and a scheduler's SIGTERM: the step is finished, the state saved, and the run can go on later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from leyden.callbacks.agreement import Agreement
from leyden.callbacks.checkpoint import Checkpoint, is_between_batches
from leyden.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(Callback):
    """Ends a run that was told to stop, with what it has learned.

    While a run trains, a signal is noted and obeyed at the end of the step, or of the validation's batch; at other
    times at once. Several processes stop at the same place, whichever was told. A second SIGINT ends the process
    without anything more; files are written whole or not at all.

    Args:
        abort: called before a second SIGINT ends the process.
    """

    def __init__(self, abort: Callable[[], None] = lambda: None) -> None:
        self.abort = abort
        self.received: signal.Signals | None = None
        self._waits = False
        self._agreement = Agreement("stop")

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals inside the block (in the main thread, which alone can)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._register()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _register(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                self.abort()
                os._exit(128 + number)
            return
        self.received = signal.Signals(number)
        if not self._waits:
            raise Interrupted(self.received)

    # ---- while training: obeyed at the next safe point -----------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has put a handler of its own before these, which would end the run without saving
        self._register()
        self._waits = True
        if trainer.world_size > 1:  # it would also let the processes agree at each step, by waiting for the device
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        else:
            self._stop(trainer, self.received)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = trainer.checkpoint_callback
        if not isinstance(checkpoint, Checkpoint) or checkpoint.saved_step == trainer.global_step:
            self._stop(trainer, self._agreement.decide(self.received))  # else after the next batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_between_batches(trainer, batch_idx):
            self._stop(trainer, self._agreement.decide(self.received), save=True)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.world_size > 1:
            return  # processes validate at their own pace; it goes on to where all can stop
        if trainer.sanity_checking:
            self._stop(trainer, self.received)
        elif not trainer.should_stop:  # else training is over once this validation is
            self._stop(trainer, self.received, save=True, validation_pending=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = trainer.checkpoint_callback  # which comes after this callback
        if self.received is not None and isinstance(checkpoint, Checkpoint):
            checkpoint.hurries = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waits = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = self._agreement.decide(self.received)
        if trainer.world_size > 1 and number is None:
            trainer.strategy.barrier()  # after which all know what one of them asked for here
            number = self._agreement.decide(self.received)
        self._stop(trainer, number)  # trained to the end and saved, but not tested

    def _stop(self, trainer: Trainer, number: int | None, save: bool = False, **options: Any) -> None:
        if number is None:
            return
        checkpoint = trainer.checkpoint_callback
        if save and isinstance(checkpoint, Checkpoint):
            checkpoint.save(trainer, **options)
        raise Interrupted(signal.Signals(number), trainer.global_step)
