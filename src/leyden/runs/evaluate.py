"""The metrics of a trained run on one of its splits, computed again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch

from leyden.data.loaders import BatchLoader
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
    checkpoint = load_checkpoint(run)
    task, data = restore(checkpoint)
    data.prepare_data()
    data.setup("test")
    check_same_data(data.state_dict(), checkpoint.data_state, data.describe())
    if data.num_samples(split) == 0:
        raise DataError(f"The {split} split of {data.describe()} is empty.")
    task.setup("test")
    loader = data.make_loader(split, shuffle=False, batch_size=batch_size)
    assert isinstance(loader, BatchLoader)
    for batch in loader.batches():
        ready = data.transform_batch(batch, None)
        task._evaluate("test", ready)
    return {name.replace("test/", f"{split}/"): value for name, value in task.compute_phase("test").items()}


def check_same_data(found: dict[str, Any], trained: dict[str, Any], source: str) -> None:
    """Compares what was fitted on the training rows that are there now with what the checkpoint holds.

    Raises:
        DataError: where they differ: classes, scales or characters would not mean to the network what they meant.
    """
    changed = [
        name
        for part in ("facts", "fitted")
        for name in sorted({*found.get(part, {}), *trained.get(part, {})})
        if not _is_equal(found.get(part, {}).get(name), trained.get(part, {}).get(name))
    ]
    if changed:
        raise DataError(
            f"The training rows of {source} are not those of this run: {', '.join(changed)} changed. "
            "Bring the old data back, or use `leyden predict` on the new rows."
        )


def _is_equal(found: Any, trained: Any) -> bool:
    """Equality of plain values and tensors; the last bits of a number depend on the machine."""
    if isinstance(found, torch.Tensor) and isinstance(trained, torch.Tensor):
        return found.shape == trained.shape and torch.allclose(found, trained)
    if isinstance(found, list | tuple) and isinstance(trained, list | tuple):
        return len(found) == len(trained) and all(map(_is_equal, found, trained))
    if isinstance(found, dict) and isinstance(trained, dict):
        return found.keys() == trained.keys() and all(_is_equal(found[key], trained[key]) for key in found)
    if isinstance(found, float) and isinstance(trained, float):
        return math.isclose(found, trained, rel_tol=1e-5, abs_tol=1e-8)
    return bool(found == trained)
