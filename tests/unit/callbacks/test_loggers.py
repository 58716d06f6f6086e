"""TensorBoard read back with its own reader, and history.csv."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from leyden.callbacks.loggers import History, TensorBoard, flatten_for_hparams

CONFIG: dict[str, Any] = {"seed": 0, "optim": {"lr": 0.1, "betas": [0.9, 0.999]}, "note": None, "name": "größe"}


def read(folder: Path) -> EventAccumulator:
    (file,) = (folder / "tensorboard").glob("events.*")
    return EventAccumulator(str(file)).Reload()


def test_scalars_on_the_axis_of_steps(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.log_metrics({"train/loss": 0.5}, step=3)
    board.log_metrics({"train/loss": 0.25}, step=7)
    board.close()
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("train/loss")] == [(3, 0.5), (7, 0.25)]


def test_one_file_although_fit_and_test_each_end(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.log_metrics({"val/loss": 1.0}, step=1)
    board.finalize("success")
    board.log_metrics({"test/loss": 2.0}, step=1)
    board.finalize("success")
    board.close()
    found = read(tmp_path)
    assert found.Tags()["scalars"] == ["val/loss", "test/loss"]
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "tensorboard").iterdir()) == ["events"]


def test_config_is_shown_as_text(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.log_config(CONFIG)
    board.close()
    found = read(tmp_path)
    (event,) = found.Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "    optim:\n      lr: 0.1" in text
    assert "größe" in text


def test_results_are_one_session_and_scalars(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.log_results(CONFIG, {"test/loss": 0.5, "objective": 0.25}, step=9)
    board.close()
    found = read(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("test/loss")] == [(9, 0.5)]
    assert [(event.step, event.value) for event in found.Scalars("objective")] == [(9, 0.25)]
    tags = found.PluginTagToContent(metadata.PLUGIN_NAME)
    assert set(tags) == {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = metadata.parse_session_start_info_plugin_data(tags["_hparams_/session_start_info"])
    shown = {name: value.WhichOneof("kind") for name, value in start.hparams.items()}
    assert set(shown) == {"seed", "optim.lr", "optim.betas", "name"}
    assert start.hparams["optim.lr"].number_value == 0.1


def test_figures_are_shown(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([0, 1], [0, 1])
    board.log_figures({"curve": figure}, step=5)
    board.close()
    (event,) = read(tmp_path).Images("curve")
    assert event.step == 5
    assert event.encoded_image_string.startswith(b"\x89PNG")


def test_history_has_a_row_for_each_time_something_is_logged(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("other files of the run folder stay")
    history = History(str(tmp_path))
    history.log_metrics({"train/loss_step": 0.5}, step=1)
    history.log_metrics({"train/loss_step": 0.25}, step=2)
    history.log_metrics({"val/loss": 0.75, "epoch": 0.0}, step=2)
    history.save()
    history.log_metrics({"test/loss": 1.0}, step=2)  # a column that was not there before
    history.finalize("success")
    frame = pl.read_csv(tmp_path / "history.csv")
    assert frame.select("step", "train/loss_step", "val/loss", "epoch", "test/loss").rows() == [
        (1, 0.5, None, None, None),
        (2, 0.25, None, None, None),
        (2, None, 0.75, 0.0, None),
        (2, None, None, None, 1.0),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.csv", "train.log"]


@pytest.mark.parametrize(
    ("config", "flat"),
    [
        ({}, {}),
        ({"a": {"b": {"c": 1}}, "d": 2.5}, {"a.b.c": 1, "d": 2.5}),
        ({"a": True, "b": "x", "c": None}, {"a": True, "b": "x"}),
        ({"a": [1, {"b": 2}]}, {"a": "[1, {'b': 2}]"}),
        ({"a": {}}, {}),
        ({"a": math.inf}, {"a": math.inf}),
    ],
)
def test_flatten(config: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flatten_for_hparams(config) == flat
