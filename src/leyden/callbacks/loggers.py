"""Loggers: TensorBoard, and the run folder's own history.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.utils.tensorboard.summary import hparams

from leyden.config import flatten

# Rows of history.csv that are kept in memory before they are written; a checkpoint writes them as well.
ROWS_PER_SAVE = 100


class TensorBoard(TensorBoardLogger):
    """TensorBoard files in `tensorboard/` of the run folder: scalars, the config as text, one HPARAMS session.

    Args:
        save_dir: the run folder; given by the wiring.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir=save_dir, name="tensorboard", version="", default_hp_metric=False)

    def save(self) -> None:
        """Writes what is buffered; the settings are in the run folder already, so no file of their own."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Flushes. Fit and test each end with this, but a closed writer would start a second file."""
        self.save()

    def close(self) -> None:
        """Ends the event file."""
        self.experiment.close()

    def resume_from(self, step: int) -> None:
        """Goes on after a step: what an earlier file of this folder shows beyond it no longer counts."""
        self._kwargs["purge_step"] = step + 1

    def log_config(self, config: dict[str, Any]) -> None:
        """Shows the config under TEXT."""
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        self.experiment.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log_figures(self, figures: dict[str, Figure], step: int) -> None:
        """Shows figures under IMAGES."""
        for name, figure in figures.items():
            FigureCanvasAgg(figure)  # figures of Leyden have no window, so they need a canvas to draw on
            self.experiment.add_figure(name, figure, step, close=False)

    def log_results(self, config: dict[str, Any], results: dict[str, float], step: int) -> None:
        """Writes the run's one HPARAMS session: flat settings and the final metrics, which become scalars too."""
        # What is compared between runs; where files go and what runs beside training would only hide it.
        compared = {key: value for key, value in config.items() if key not in ("callbacks", "logger", "paths")}
        for summary in hparams(flatten_for_hparams(compared), results):
            self.experiment.file_writer.add_summary(summary)
        for name, value in results.items():
            self.experiment.add_scalar(name, value, step)


class History(Logger):
    """history.csv of the run folder: one row per logged step and per epoch, on the axis of optimiser steps.

    Rows are appended; where a new column comes in, the file is written anew beside the old one and renamed, so that a
    run that is killed loses no row that was saved.

    Args:
        save_dir: the run folder.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._path = Path(save_dir) / "history.csv"
        self._columns: list[str] = []
        self._unsaved: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the settings are in the run folder already."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds a row."""
        self._unsaved.append({**metrics, "step": step or 0})
        if len(self._unsaved) >= ROWS_PER_SAVE:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Writes the rows that were added."""
        rows, self._unsaved = self._unsaved, []
        columns = sorted({*self._columns, *(name for row in rows for name in row)})
        if columns != self._columns:
            rows = [*self._read_rows(), *rows]
            self._columns = columns
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            self._write(temporary, "w", rows)
            temporary.replace(self._path)
        elif rows:
            self._write(self._path, "a", rows)

    def finalize(self, status: str) -> None:
        """Writes what is left."""
        self.save()

    @rank_zero_only
    def resume_from(self, step: int) -> None:
        """Goes on after a step: later rows are of steps that are taken again, and an earlier test no longer counts."""
        tests = [name for row in self._read_rows() for name in row if name.startswith("test/")]
        self._unsaved = [row for row in self._read_rows() if row["step"] <= step and not set(row) & set(tests)]
        self._columns = []
        self._path.unlink(missing_ok=True)
        self.save()

    def _write(self, path: Path, mode: Literal["w", "a"], rows: list[dict[str, float]]) -> None:
        with path.open(mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)

    def _read_rows(self) -> list[dict[str, float]]:
        """The rows that are saved; the last may be a part, where a run was killed while it wrote."""
        if not self._path.is_file():
            return []
        text = self._path.read_text(encoding="utf-8")
        lines = text[: text.rindex("\n") + 1].splitlines() if "\n" in text else []
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def flatten_for_hparams(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """A nested config as dotted keys with values that TensorBoard's HPARAMS can show."""
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flatten(config).items()
        if value is not None
    }
