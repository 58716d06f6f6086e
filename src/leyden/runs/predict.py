"""Predictions for new rows, pictures or texts from a trained run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import torch

from leyden.data.datamodule import DataModule, Inputs
from leyden.engine.task import Task
from leyden.errors import ConfigError
from leyden.runs.restore import load_checkpoint, restore


def predict_file(run: Path, inputs: Path, batch_size: int = 256) -> pl.DataFrame:
    """Predicts for every row of a table, every picture of a folder, or one picture.

    Needs the checkpoint only: no training data is read.

    Returns:
        one row per input: `id` (row number from 1, or path) and the prediction's columns.

    Raises:
        ConfigError, DataError: when the run or the inputs cannot be read.
    """
    task, data = restore(load_checkpoint(run))
    rows = data.read_inputs(inputs)
    columns = predict_rows(task, data, rows, batch_size)
    return pl.DataFrame({"id": pl.Series(rows.ids, dtype=pl.String), **columns})


@torch.no_grad()
def predict_rows(task: Task, data: DataModule, rows: Inputs, batch_size: int) -> dict[str, list[Any]]:
    """Predictions for rows as named columns, in batches."""
    columns: dict[str, list[Any]] = {}
    for start in range(0, max(1, len(rows.ids)), batch_size):
        part = {name: tensor[start : start + batch_size] for name, tensor in rows.tensors.items()}
        outputs = task.predict_step(data.transform_batch(data.trim_batch(part), None))
        for name, values in task.predictions(outputs).items():
            columns.setdefault(name, []).extend(values)
    return columns


WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    ".csv": lambda frame, path: frame.write_csv(path),
    ".jsonl": lambda frame, path: frame.write_ndjson(path),
    ".parquet": lambda frame, path: frame.write_parquet(path),
}


def write_table(frame: pl.DataFrame, path: Path) -> None:
    """Writes a table in the format its suffix names; never over an existing file.

    Raises:
        ConfigError: for an unknown suffix or a file that exists.
    """
    if path.suffix not in WRITERS:
        raise ConfigError(f"{path}: predictions are written as {', '.join(WRITERS)}, not '{path.suffix}'.")
    if path.exists():
        raise ConfigError(f"{path.absolute()} exists already. Remove it, or name another file with --output.")
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](frame, path)
