"""Loggers: TensorBoard, and the run folder's own history.csv."""

from __future__ import annotations

import warnings
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
        for summary in hparams(flatten(config), results):
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

    @property
    def experiment(self) -> _ExperimentWriter:
        if self._experiment is None:
            with warnings.catch_warnings():
                # The run folder holds other files by now; the writer would only clear its own.
                warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
                self._experiment = _HistoryWriter(log_dir=str(self._root_dir))
        return self._experiment


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
