"""A record of every optimiser step, by which two runs can be compared to the last bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from lightning.pytorch import Callback, LightningModule, Trainer

from leyden.errors import ConfigError


class Trace(Callback):
    """Writes trace.jsonl in the run folder: step, epoch, rate, loss and sample numbers of each step.

    It reads the loss at every step, which costs time, so it is for proofs and not for every day. A resumed run drops
    the rows of steps that it takes again.

    Args:
        kill_at_step: the process kills itself by SIGKILL before this step, as a machine that fails would; null never.
    """

    def __init__(self, kill_at_step: Annotated[int, Ge(0)] | None = None) -> None:
        self.kill_at_step = kill_at_step
        self._path = Path()
        self._rows: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the data for the numbers of the samples in each batch."""
        self._path = Path(trainer.default_root_dir) / f"trace{trainer.global_rank or ''}.jsonl"
        trainer.datamodule.with_index = True  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(pl_module, "step_listeners"):
            raise ConfigError(f"`callbacks.trace` needs a task of Leyden, but {type(pl_module).__name__} is none.")
        pl_module.step_listeners.append(lambda: self._note(trainer, pl_module))  # type: ignore[operator, union-attr]
        kept = [row for row in read_trace(self._path) if row["step"] < trainer.global_step]
        self._path.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")

    def _note(self, trainer: Trainer, task: Any) -> None:
        if trainer.global_step == self.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = [float(loss).hex() for loss in task.losses_of_step]
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._rows.append({"step": trainer.global_step, "epoch": trainer.current_epoch, "lr": rate, "loss": losses})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rows, self._rows = self._rows, []
        batches = [batch] if isinstance(batch, dict) else list(batch.source)
        per_step = -(-len(batches) // max(1, len(rows)))
        for index, row in enumerate(rows):
            taken = batches[index * per_step : (index + 1) * per_step]
            row["samples"] = [number for part in taken for number in part["index"].tolist()]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The rows of a trace; the last line may be a part, where the run was killed while it wrote."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
