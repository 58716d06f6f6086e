"""Regression data: any table, and the tables that come with Leyden."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

import polars as pl
import torch
from annotated_types import Ge, Lt
from torch import Tensor

from leyden.data.datamodule import DataModule, Inputs, Loading
from leyden.data.loaders import Batch
from leyden.data.splits import split_problems, split_rows
from leyden.data.tables import Impute, TableEncoder, list_rows, read_numbers, read_table, require_columns
from leyden.errors import DataError

log = logging.getLogger(__name__)

Fraction = Annotated[float, Ge(0), Lt(1)]


class TableData(DataModule):
    """Numbers in one or more columns of a table, from the other columns.

    Batches: `features` (B, num_features) float32, standardised and one-hot; `target` (B, num_targets) float32 in
    the target's own units.

    Args:
        path: CSV, TSV, JSON lines or Parquet.
        target: column to predict, or a list of them.
        features: columns to learn from; null takes all others.
        categorical: columns that are categories although they hold numbers.
        impute: rule for missing values: null refuses them, "mean" puts the training mean in their place.
        val_path: a table of its own for validation; null takes `val_frac` of the rows.
        test_path: a table of its own for the test; null takes `test_frac` of the rows.
        val_frac: share of the rows for validation; 0 asks for none.
        test_frac: share of the rows for the test.
        split_seed: of the assignment of rows to splits; rows with equal inputs are never in two splits.
        encoding: of text files.
        batch_size: global batch size.
        seed: of the order of samples.
        reference: a known result for this data.
        loading: where the data stays and how it is read.
    """

    label_key = "target"

    def __init__(
        self,
        path: str,
        target: str | Sequence[str],
        features: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        impute: Impute = None,
        val_path: str | None = None,
        test_path: str | None = None,
        val_frac: Fraction = 0.15,
        test_frac: Fraction = 0.2,
        split_seed: Annotated[int, Ge(0)] = 0,
        encoding: str = "utf-8",
        batch_size: Annotated[int, Ge(1)] = 32,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, reference, **loading)
        self.path = path
        self.targets = [target] if isinstance(target, str) else list(target)
        self.features = list(features) if features is not None else None
        self.categorical = list(categorical) if categorical is not None else None
        self.val_path, self.test_path = val_path, test_path
        self.val_frac, self.test_frac = val_frac, test_frac
        self.split_seed = split_seed
        self.encoding = encoding
        self.allows_empty_val = val_frac == 0 and val_path is None
        self.encoder = TableEncoder(impute)

    @classmethod
    def config_problems(cls, values: dict[str, Any]) -> list[str]:
        """Rules between keys that their types cannot say; `{key}` stands for the section."""
        return split_problems(values)

    def read_frame(self) -> pl.DataFrame:
        """The whole table, before splitting."""
        return read_table(Path(self.path), self.encoding)

    def load_splits(self) -> dict[str, Batch]:
        frames = self._split_frames()
        train = frames["train"]
        names = self.features if self.features is not None else [c for c in train.columns if c not in self.targets]
        overlap = sorted(set(names) & set(self.targets))
        if overlap:
            raise DataError(
                f"`data.features` and `data.target` both have {', '.join(overlap)}: the answer would be an input."
            )
        self.features = names
        for frame, source in ((frame, self._source(name)) for name, frame in frames.items()):
            require_columns(frame, self.targets, source, "data.target")
            require_columns(frame, names, source, "data.features")
        if not len(train):
            return {name: {} for name in frames}  # `setup` says so
        for name, frame in frames.items():
            if len(frame) == 1:
                raise DataError(
                    f"The {name} split of {self._source(name)} has 1 row, but R2 needs at least 2. "
                    "Add rows, or change the sizes of the splits (data.val_frac, data.test_frac)."
                )
        self.encoder.fit(train, names, self.categorical, self._source("train"))
        splits = {name: self._tensors(frame, name) for name, frame in frames.items()}
        target = splits["train"]["target"]
        std = target.std(dim=0, correction=0)
        self.facts = {
            "num_features": len(self.encoder.feature_names),
            "num_targets": len(self.targets),
            "feature_names": self.encoder.feature_names,
            "target_mean": target.mean(dim=0).tolist(),
            "target_std": torch.where(std > 0, std, torch.ones_like(std)).tolist(),
        }
        return splits

    def _source(self, split: str) -> str:
        """The file a split comes from, for messages."""
        own = {"val": self.val_path, "test": self.test_path}.get(split)
        return str(own or getattr(self, "path", type(self).__name__))

    def _split_frames(self) -> dict[str, pl.DataFrame]:
        frame = self.read_frame()
        require_columns(frame, self.targets, self._source("train"), "data.target")
        if len(frame) == 0:
            raise DataError(f"{self._source('train')} has a header but no rows.")
        val_frac = 0.0 if self.val_path else self.val_frac
        test_frac = 0.0 if self.test_path else self.test_frac
        require_columns(frame, self.features or [], self._source("train"), "data.features")
        inputs = frame.drop(self.targets) if self.features is None else frame.select(self.features)
        self._check_cells(frame, inputs.columns)
        rows = split_rows(
            inputs.rows() if inputs.width else list(range(len(frame))), val_frac, test_frac, self.split_seed
        )
        frames = {name: frame[indices] for name, indices in rows.items()}
        for name, path in (("val", self.val_path), ("test", self.test_path)):
            if path:
                frames[name] = read_table(Path(path), self.encoding)
        return frames

    def _check_cells(self, frame: pl.DataFrame, features: Sequence[str]) -> None:
        """Looks at all cells before the rows are split, so that row numbers in messages are those of the file."""
        source = self._source("train")
        require_columns(frame, self.categorical or [], source, "data.categorical")
        TableEncoder(self.encoder.impute).fit(frame, features, self.categorical, source)
        for name in self.targets:
            self._target_column(frame[name], source)

    def _tensors(self, frame: pl.DataFrame, split: str) -> Batch:
        source = f"{self._source(split)} ({split} rows)"
        if len(frame) == 0:
            return {
                "features": torch.zeros(0, len(self.encoder.feature_names)),
                "target": torch.zeros(0, len(self.targets)),
            }
        for name, counts in self.encoder.unknown_categories(frame).items():
            log.warning("%s: column %s has values that no training row has: %s", source, name, dict(counts))
        columns = [self._target_column(frame[name], source) for name in self.targets]
        return {"features": self.encoder.transform(frame, source), "target": torch.stack(columns, dim=1)}

    @staticmethod
    def _target_column(column: pl.Series, source: str) -> Tensor:
        numbers = read_numbers(column, source, "A target must be a number.")
        bad = [row for row, value in enumerate(numbers) if value is None or abs(value) == float("inf")]
        if bad:
            raise DataError(
                f"{source}: the target `{column.name}` is missing or infinite in {len(bad)} row(s) ({list_rows(bad)}). "
                "Remove these rows."
            )
        return torch.tensor(numbers, dtype=torch.float64).float()

    def read_inputs(self, path: Path) -> Inputs:
        frame = read_table(path, self.encoding)
        columns = [*self.encoder.numeric, *self.encoder.categories]
        require_columns(frame, columns, path, "columns of the training data")
        if len(frame) == 0:
            return Inputs([], {"features": torch.zeros(0, len(self.encoder.feature_names))})
        ids = [str(row + 1) for row in range(len(frame))]
        return Inputs(ids, {"features": self.encoder.transform(frame, path)})

    def fitted_state(self) -> dict[str, Any]:
        return self.encoder.state()

    def load_fitted_state(self, state: dict[str, Any]) -> None:
        self.encoder = TableEncoder(**state)


class AutoMpg(TableData):
    """Fuel consumption of 392 cars of 1970 to 1982, in miles per gallon, from 7 columns (the origin is a category).

    Source: CRCARS data set, D. Donoho and E. Ramos 1982, 1983 Data Exposition of the American Statistical
    Association; CC0-1.0. Cars of the same make and model are different years and stay separate rows.
    """

    def __init__(
        self,
        val_frac: Fraction = 0.15,
        test_frac: Fraction = 0.2,
        split_seed: Annotated[int, Ge(0)] = 0,
        batch_size: Annotated[int, Ge(1)] = 32,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(
            path=str(Path(__file__).with_name("auto_mpg.csv")),
            target="mpg",
            features=["cyl", "displ", "hp", "weight", "accel", "yr", "origin"],
            categorical=["origin"],
            val_frac=val_frac,
            test_frac=test_frac,
            split_seed=split_seed,
            batch_size=batch_size,
            seed=seed,
            reference=reference,
            **loading,
        )

    def describe(self) -> str:
        return "AutoMpg"


class Diabetes(TableData):
    """Progression of diabetes after a year in 442 patients, from 10 measurements.

    Source: Efron et al. 2004, https://doi.org/10.1214/009053604000000067; comes with scikit-learn.
    """

    def __init__(
        self,
        val_frac: Fraction = 0.15,
        test_frac: Fraction = 0.2,
        split_seed: Annotated[int, Ge(0)] = 0,
        batch_size: Annotated[int, Ge(1)] = 32,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(
            path="scikit-learn's diabetes",
            target="progression",
            val_frac=val_frac,
            test_frac=test_frac,
            split_seed=split_seed,
            batch_size=batch_size,
            seed=seed,
            reference=reference,
            **loading,
        )

    def read_frame(self) -> pl.DataFrame:
        from sklearn.datasets import load_diabetes

        found = load_diabetes(scaled=False)
        frame = pl.DataFrame(found.data, schema=list(found.feature_names))
        return frame.with_columns(pl.Series("progression", found.target))

    def describe(self) -> str:
        return "Diabetes"


class LineData(TableData):
    """y = 2x, learned from x = 1, 2, 3 and tested beyond them on x = 4, 5, 6; no validation."""

    def __init__(
        self,
        batch_size: Annotated[int, Ge(1)] = 3,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(
            path="y = 2x",
            target="y",
            val_frac=0.0,
            test_frac=0.0,
            batch_size=batch_size,
            seed=seed,
            reference=reference,
            **loading,
        )

    def _split_frames(self) -> dict[str, pl.DataFrame]:
        xs = {"train": [1.0, 2.0, 3.0], "val": [], "test": [4.0, 5.0, 6.0]}
        return {
            name: pl.DataFrame({"x": values, "y": [2 * x for x in values]}, schema={"x": pl.Float64, "y": pl.Float64})
            for name, values in xs.items()
        }

    def probes(self) -> Inputs:
        frame = pl.DataFrame({"x": [4.0]})
        return Inputs(["4.0"], {"features": self.encoder.transform(frame, "probe")})
