"""Pictures of a run: its learning curves, and what its task draws of the test."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.figure import Figure


def draw_curves(history: Path) -> Figure:
    """Loss and metrics of training and validation over optimiser steps, from history.csv."""
    frame = pl.read_csv(history, infer_schema_length=None)
    names = sorted({name.split("/", 1)[1] for name in frame.columns if name.startswith(("train/", "val/"))})
    panels = [name for name in names if name not in ("loss_step", "lr", "loss")]
    panels = ["loss", *panels]
    figure = Figure(figsize=(4 * len(panels), 3), layout="constrained")
    for index, name in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for phase in ("train", "val"):
            column = f"{phase}/{name}"
            if column in frame.columns:
                points = frame.select("step", column).drop_nulls()
                axes.plot(points["step"], points[column], label=phase, marker="." if len(points) < 30 else None)
        axes.set(title=name, xlabel="optimiser step")
        axes.grid(alpha=0.3)
        if name == "loss" and frame["step"].max() is not None:
            axes.set_yscale("log")
        axes.legend()
    return figure


def write_pictures(figures: dict[str, Figure], folder: Path) -> None:
    """Writes figures as `<name>.png`."""
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=110)
