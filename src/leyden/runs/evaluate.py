"""The metrics of a trained run on one of its splits, computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from leyden.data.loaders import TensorLoader
from leyden.errors import DataError
from leyden.runs.restore import load_checkpoint, restore


@torch.no_grad()
def evaluate_run(
    run: Path, split: Literal["train", "val", "test"] = "test", batch_size: int | None = None
) -> dict[str, float]:
    """Evaluates the best checkpoint of a run on its own data.

    Args:
        run: a run folder or a checkpoint.
        split: which rows.
        batch_size: rows at a time; changes the speed only. None takes the run's own.

    Returns:
        metrics as `split/name`.

    Raises:
        ConfigError, DataError: when the run or its data cannot be read.
    """
    task, data = restore(load_checkpoint(run))
    data.prepare_data()
    data.setup("test")
    if data.num_samples(split) == 0:
        raise DataError(f"The {split} split of {data.describe()} is empty.")
    task.setup("test")
    loader = TensorLoader(data.splits[split], batch_size or data.batch_size, False, 0, trim=data.trim_batch)
    for batch in loader.batches():
        ready = data.transform_batch(batch, None)
        task._update("test", *task.compute_loss(ready), ready)
    return {name.replace("test/", f"{split}/"): value for name, value in task.compute_phase("test").items()}
