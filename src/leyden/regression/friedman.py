"""A set of any size: ten numbers drawn at random, five of which make the target."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Unpack

import numpy as np
import polars as pl
import torch
from annotated_types import Ge
from rich.console import Console
from rich.progress import track
from torch import Tensor

from leyden.data.cache import build_once
from leyden.data.datamodule import DataModule, Inputs, Loading
from leyden.data.loaders import Batch
from leyden.data.order import derive_seed
from leyden.data.residency import map_arrays
from leyden.data.tables import read_table, require_columns

log = logging.getLogger(__name__)

NUM_FEATURES = 10
ROWS_AT_A_TIME = 2**18


class FriedmanData(DataModule):
    """y = 10 sin(pi x0 x1) + 20 (x2 - 0.5)^2 + 10 x3 + 5 x4 + noise; x0 .. x9 uniform in 0 .. 1.

    The rows are drawn once into memory-mapped files in `cache_dir` and are the same for every run with the same
    `num_rows`, `noise_std` and `data_seed`. No model has a smaller mean squared error than the noise's variance.

    Batches: `features` (B, 10) float32, standardised by the moments of the uniform distribution; `target` (B, 1)
    float32.

    Args:
        num_rows: to learn from; a row takes 44 bytes.
        num_eval_rows: for validation, and as many for the test.
        noise_std: of the normal noise.
        data_seed: of the rows; independent of the run's seed.
        batch_size: global batch size.
        seed: of the order of samples.
        reference: a known result for this data.
        loading: where the data stays and how it is read.

    Source: Friedman 1991, Multivariate Adaptive Regression Splines, https://doi.org/10.1214/aos/1176347963.
    """

    label_key = "target"

    def __init__(
        self,
        num_rows: Annotated[int, Ge(2)] = 10_000_000,
        num_eval_rows: Annotated[int, Ge(2)] = 10_000,
        noise_std: Annotated[float, Ge(0)] = 1.0,
        data_seed: Annotated[int, Ge(0)] = 0,
        batch_size: Annotated[int, Ge(1)] = 4096,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, reference, **loading)
        self.num_rows = {"train": num_rows, "val": num_eval_rows, "test": num_eval_rows}
        self.noise_std = noise_std
        self.data_seed = data_seed

    @property
    def folder(self) -> Path:
        """Where the rows are."""
        rows = "-".join(str(count) for count in (self.num_rows["train"], self.num_rows["val"]))
        return Path(self.loading["cache_dir"]) / f"friedman-{rows}-{self.noise_std:g}-{self.data_seed}"

    def prepare_data(self) -> None:
        """Draws the rows, unless they are there."""
        build_once(self.folder, self._write_rows)

    def load_splits(self) -> dict[str, Batch]:
        splits = map_arrays(self.folder)
        self.is_mapped = True
        self._state_facts(*moments(splits["train"]["target"]))
        return splits

    def outline(self) -> dict[str, Batch]:
        self.is_mapped = True
        self._state_facts(0.0, 1.0)
        widths = {"features": NUM_FEATURES, "target": 1}
        return {
            split: {name: torch.empty(count, width, device="meta") for name, width in widths.items()}
            for split, count in self.num_rows.items()
        }

    def _state_facts(self, mean: float, std: float) -> None:
        self.facts = {
            "num_features": NUM_FEATURES,
            "num_targets": 1,
            "feature_names": [f"x{index}" for index in range(NUM_FEATURES)],
            "target_mean": [mean],
            "target_std": [std],
        }

    def _write_rows(self, folder: Path) -> None:
        log.info("Drawing %s rows into %s.", f"{sum(self.num_rows.values()):,}", self.folder)
        for split, count in self.num_rows.items():
            shapes = {"features": (count, NUM_FEATURES), "target": (count, 1)}
            files = {
                name: np.lib.format.open_memmap(folder / f"{split}.{name}.npy", "w+", np.float32, shape)
                for name, shape in shapes.items()
            }
            starts = range(0, count, ROWS_AT_A_TIME)
            hidden = len(starts) == 1
            for start in track(starts, f"{split} rows", console=Console(stderr=True), disable=hidden, transient=True):
                stop = min(start + ROWS_AT_A_TIME, count)
                generator = np.random.default_rng(derive_seed(self.data_seed, split, start))
                rows = draw_rows(stop - start, self.noise_std, generator)
                files["features"][start:stop], files["target"][start:stop, 0] = rows
            for file in files.values():
                file.flush()

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        # A uniform number has mean 1/2 and variance 1/12
        return {**batch, "features": (batch["features"] - 0.5).mul_(math.sqrt(12))}

    def read_inputs(self, path: Path) -> Inputs:
        frame = read_table(path, "utf-8")
        names = [f"x{index}" for index in range(NUM_FEATURES)]
        require_columns(frame, names, path, "the features")
        rows = frame.select(names).cast(pl.Float64).to_numpy(writable=True)
        return Inputs([str(row + 1) for row in range(len(rows))], {"features": torch.from_numpy(rows).float()})

    def describe(self) -> str:
        return f"FriedmanData ({self.folder})"


def draw_rows(
    count: int, noise_std: float, generator: np.random.Generator
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Features (count, 10) and targets (count,), float32."""
    x = generator.random((count, NUM_FEATURES), dtype=np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y + noise_std * generator.standard_normal(count, dtype=np.float32)).astype(np.float32)


def moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a large tensor in float64, a part at a time."""
    parts = values.flatten().split(ROWS_AT_A_TIME)
    mean = sum(float(part.double().sum()) for part in parts) / values.numel()
    variance = sum(float((part.double() - mean).square().sum()) for part in parts) / values.numel()
    return mean, math.sqrt(variance) or 1.0
