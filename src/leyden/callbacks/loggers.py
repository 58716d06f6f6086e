"""Loggers: TensorBoard, and the run folder's own history.csv."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.utils.tensorboard.summary import hparams


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
        for summary in hparams(flatten(compared), results):
            self.experiment.file_writer.add_summary(summary)
        for name, value in results.items():
            self.experiment.add_scalar(name, value, step)


class _HistoryWriter(_ExperimentWriter):
    NAME_METRICS_FILE = "history.csv"


class History(CSVLogger):
    """history.csv of the run folder: one row per logged step and per epoch, on the axis of optimiser steps.

    Args:
        save_dir: the run folder.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir=save_dir, name="", version="")
        self._kept_until: int | None = None

    @property
    def experiment(self) -> _ExperimentWriter:
        if self._experiment is None:
            with warnings.catch_warnings():
                # The run folder holds other files by now; the writer would only clear its own.
                warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
                rows = self._read_rows()
                self._experiment = _HistoryWriter(log_dir=str(self._root_dir))
                for row in rows:
                    self._experiment.log_metrics({k: v for k, v in row.items() if k != "step"}, int(row["step"]))
        return self._experiment

    def resume_from(self, step: int) -> None:
        """Goes on after a step: later rows are of steps that are taken again, and an earlier test no longer counts."""
        self._kept_until = step

    def _read_rows(self) -> list[dict[str, float]]:
        path = Path(str(self._root_dir)) / _HistoryWriter.NAME_METRICS_FILE
        if self._kept_until is None or not path.is_file():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        tested = [any(name.startswith("test/") for name in row) for row in rows]
        return [row for row, test in zip(rows, tested, strict=True) if row["step"] <= self._kept_until and not test]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """A nested config as dotted keys with values that TensorBoard's HPARAMS can show."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            flat[f"{prefix}{key}"] = value
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat
