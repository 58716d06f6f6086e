"""Tables: reading CSV, JSON lines and Parquet, and turning columns into numbers fitted on training rows."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from torch import Tensor

from leyden.errors import DataError

Impute = Literal["mean"] | None


def read_table(path: Path, encoding: str = "utf-8") -> pl.DataFrame:
    """Reads a table; every CSV cell stays text, an empty cell is missing, blanks round column names go.

    Raises:
        DataError: when the file is not there, not readable, or of another kind.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path.absolute()}. Check the path (it is relative to the current folder).")
    try:
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path)
        elif path.suffix in (".jsonl", ".ndjson"):
            frame = pl.read_ndjson(io.BytesIO(_decode(path, encoding)), infer_schema_length=None)
        elif path.suffix in (".csv", ".tsv", ".txt"):
            separator = "\t" if path.suffix == ".tsv" else ","
            frame = pl.read_csv(io.BytesIO(_decode(path, encoding)), separator=separator, infer_schema=False)
        else:
            raise DataError(f"{path}: unknown kind of table '{path.suffix}'. Use .csv, .tsv, .jsonl or .parquet.")
        frame = frame.rename({name: name.strip() for name in frame.columns if name != name.strip()})
    except pl.exceptions.NoDataError as err:
        raise DataError(f"{path} is empty: it has not even a header line.") from err
    except pl.exceptions.PolarsError as err:
        raise DataError(f"{path} cannot be read as a table: {str(err).splitlines()[0]}") from err
    return frame


def _decode(path: Path, encoding: str) -> bytes:
    content = path.read_bytes()
    try:
        return content.decode(encoding).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as err:
        line = content[: err.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line} is not {encoding} text (byte 0x{content[err.start]:02x}). "
            "Save the file as UTF-8, or name its encoding, e.g. data.encoding=latin-1."
        ) from err
    except LookupError as err:
        raise DataError(
            f"`data.encoding` is '{encoding}', which Python does not know. Use e.g. utf-8 or latin-1."
        ) from err


def require_columns(frame: pl.DataFrame, names: Sequence[str], path: object, key: str) -> None:
    """Checks that columns exist.

    Raises:
        DataError: naming the missing columns, the config key that asks for them, and the columns there are.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"{path}: there is no column {', '.join(f'`{name}`' for name in missing)} ({key}). "
            f"Columns: {', '.join(frame.columns)}."
        )


def list_rows(rows: Sequence[int], limit: int = 5) -> str:
    """Row numbers for messages, counted from 1 below the header."""
    shown = ", ".join(str(row + 1) for row in rows[:limit])
    return f"row{'s' if len(rows) > 1 else ''} {shown}{', ...' if len(rows) > limit else ''}"


def parse_numbers(column: pl.Series) -> tuple[list[float | None], list[int]]:
    """A column's cells as numbers (None where missing), and the rows whose cells are not numbers."""
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return [None if v is None or v != v else float(v) for v in column.to_list()], []
    numbers: list[float | None] = []
    wrong: list[int] = []
    for row, cell in enumerate(column.to_list()):
        text = "" if cell is None else str(cell).strip()
        try:
            value = float(text) if text else None
        except ValueError:
            wrong.append(row)
            value = None
        numbers.append(None if value is None or math.isnan(value) else value)
    return numbers, wrong


def read_numbers(column: pl.Series, path: object, advice: str) -> list[float | None]:
    """A numeric column's cells.

    Raises:
        DataError: when a cell is text, naming column, rows and the text.
    """
    numbers, wrong = parse_numbers(column)
    if wrong:
        texts = ", ".join(repr(column[row]) for row in wrong[:5])
        raise DataError(
            f"{path}: column `{column.name}` has {len(wrong)} value(s) that are not numbers "
            f"({list_rows(wrong)}: {texts}). {advice}"
        )
    return numbers


@dataclass
class TableEncoder:
    """Numbers are standardised, categories become one-hot columns; fitted on training rows only.

    Missing values, by the rule that `impute` states: None refuses them; "mean" puts the training mean in place of
    a missing or infinite number, and makes a missing category a category of its own. A category that the training
    rows do not have gets zeros in all its columns.
    """

    impute: Impute = None
    numeric: list[str] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    stds: list[float] = field(default_factory=list)
    categories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def feature_names(self) -> list[str]:
        """One name per output column."""
        return self.numeric + [f"{name}={value}" for name, values in self.categories.items() for value in values]

    def fit(
        self, frame: pl.DataFrame, features: Sequence[str], categorical: Sequence[str] | None, path: object
    ) -> None:
        """Decides which columns are numbers and fits means, deviations and categories.

        A column is a category when `categorical` lists it, or when not one of its cells is a number.

        Raises:
            DataError: for a column of lists, with both numbers and text, or with missing values that nothing imputes.
        """
        self.numeric, self.categories = [], {}
        for name in features:
            if frame[name].dtype.is_nested():
                raise DataError(
                    f"{path}: column `{name}` holds lists or objects, not numbers or text. Leave it out: data.features."
                )
            values, wrong = parse_numbers(frame[name])
            is_text = bool(wrong) and all(value is None for value in values)
            if name in (categorical or ()) or is_text:
                self.categories[name] = sorted(set(self._texts(frame[name])))
            else:
                self.numeric.append(name)
        self.check_missing(frame, path)
        numbers = [self._numbers(frame[name], path) for name in self.numeric]
        known = [[v for v in column if v is not None and math.isfinite(v)] for column in numbers]
        for name, found in zip(self.numeric, known, strict=True):
            if not found:
                raise DataError(
                    f"{path}: column `{name}` has no value in the training rows. Leave it out: data.features."
                )
        self.means = [math.fsum(values) / len(values) for values in known]
        deviations = [
            math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
            for values, mean in zip(known, self.means, strict=True)
        ]
        self.stds = [
            deviation if deviation > 1e-12 * max(1.0, abs(mean)) else 1.0
            for deviation, mean in zip(deviations, self.means, strict=True)
        ]

    def check_missing(self, frame: pl.DataFrame, path: object) -> None:
        """Refuses missing and infinite cells unless they are imputed.

        Raises:
            DataError: naming the file, and per column the number of such cells and the first rows.
        """
        found = []
        for name in [*self.numeric, *self.categories]:
            if name in self.categories:
                bad = [row for row, text in enumerate(self._texts(frame[name])) if text == ""]
            else:
                numbers = self._numbers(frame[name], path)
                bad = [row for row, value in enumerate(numbers) if value is None or math.isinf(value)]
            if bad:
                found.append(f"`{name}` ({len(bad)} of {len(frame)}: {list_rows(bad)})")
        if found and self.impute is None:
            raise DataError(
                f"{path}: missing or infinite values in {', '.join(found)}. "
                "Fill them in, or use data.impute=mean to put the training mean in their place."
            )

    def transform(self, frame: pl.DataFrame, path: object) -> Tensor:
        """Encodes rows.

        Shape:
            output (num_rows, num_features) float32.
        """
        self.check_missing(frame, path)
        columns: list[Tensor] = []
        for name, mean, std in zip(self.numeric, self.means, self.stds, strict=True):
            numbers = self._numbers(frame[name], path)
            filled = [mean if value is None or math.isinf(value) else value for value in numbers]
            columns.append((torch.tensor(filled, dtype=torch.float64) - mean) / std)
        for name, values in self.categories.items():
            index = {value: position for position, value in enumerate(values)}
            rows = [index.get(text, -1) for text in self._texts(frame[name])]
            table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 1)
            columns.extend((table == torch.arange(len(values))).double().unbind(dim=1))
        if not columns:
            raise DataError(f"{path}: there is no column to learn from. List some in data.features.")
        return torch.stack(columns, dim=1).float()

    def unknown_categories(self, frame: pl.DataFrame) -> dict[str, Counter[str]]:
        """Per categorical column, the values that the training rows did not have, with their counts."""
        unknown = {
            name: Counter(text for text in self._texts(frame[name]) if text not in set(values))
            for name, values in self.categories.items()
        }
        return {name: counts for name, counts in unknown.items() if counts}

    def state(self) -> dict[str, Any]:
        """The fitted values as plain data."""
        return {name: getattr(self, name) for name in ("impute", "numeric", "means", "stds", "categories")}

    @staticmethod
    def _texts(column: pl.Series) -> list[str]:
        return ["" if value is None else str(value).strip() for value in column.to_list()]

    @staticmethod
    def _numbers(column: pl.Series, path: object) -> list[float | None]:
        return read_numbers(column, path, f"Clean them, or add {column.name} to data.categorical.")
