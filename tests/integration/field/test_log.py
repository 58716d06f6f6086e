"""What a run writes for people: TensorBoard, the console, the names of its files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from field_data import PICTURES, SMALL, TABLE, TEXTS, table_rows, text_rows, write_csv, write_pictures, write_table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from leyden.runs.evaluate import evaluate_run
from leyden.runs.restore import load_checkpoint

BOARD = [argument for argument in SMALL if argument != "logger=null"]


def read_events(folder: Path) -> EventAccumulator:
    """The event file of a run folder."""
    files = list((folder / "tensorboard").glob("events.*"))
    assert len(files) == 1, files
    events = EventAccumulator(str(files[0]), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator) -> dict[str, list[tuple[int, float]]]:
    """Tag -> points."""
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# ---- LOG-01: HPARAMS -------------------------------------------------------------------------------------------


def test_log_01_each_run_has_one_session_with_settings_and_final_metrics(train: Callable, workspace: Path) -> None:
    write_table("table.csv", 60)
    result = train("-m", *BOARD, *TABLE, "model.net.hidden_dim=4,8")
    assert result.exit_code == 0, result.output
    assert len(result.folders) == 2
    for hidden_dim, folder in zip((4, 8), result.folders, strict=True):
        events = read_events(folder)
        sessions = {
            tag: HParamsPluginData.FromString(content) for tag, content in events.PluginTagToContent("hparams").items()
        }
        starts = [session for session in sessions.values() if session.HasField("session_start_info")]
        assert len(starts) == 1
        shown = {
            name: getattr(value, value.WhichOneof("kind"))
            for name, value in starts[0].session_start_info.hparams.items()
        }
        assert shown["model.net.hidden_dim"] == hidden_dim
        assert shown["optim.lr"] == pytest.approx(0.003)
        assert shown["data.path"] == "table.csv"
        assert not [name for name, value in shown.items() if isinstance(value, str) and value.startswith(("{", "${"))]
        experiment = next(session.experiment for session in sessions.values() if session.HasField("experiment"))
        named = {info.name.tag for info in experiment.metric_infos}
        assert named == {"objective", "test/loss", "test/mse", "test/mae", "test/r2"}
        metrics = pl.read_json(folder / "metrics.json").row(0, named=True)
        points = scalars(events)
        for name in named:
            assert points[name][-1][1] == pytest.approx(metrics[name], rel=1e-6)


# ---- LOG-02: without a logger ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("table", "logger=null"),
        ("table", "logger=[]"),
        ("table", "logger.tensorboard=null"),
        ("table", "~logger"),
        ("texts", "logger=null"),
    ],
)
def test_log_02_no_logger_still_keeps_checkpoints_and_tests(
    train: Callable, workspace: Path, kind: str, argument: str
) -> None:
    write_table("table.csv", 40)
    write_csv("texts.csv", ("text", "label"), text_rows(40))
    result = train(*BOARD, *{"table": TABLE, "texts": TEXTS}[kind], argument, "callbacks=early_stopping")
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.output
    assert not (result.folder / "tensorboard").exists()
    assert {path.name for path in result.folder.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}
    assert "test/loss" in result.metrics
    assert (result.folder / "history.csv").is_file()


def test_log_02_no_checkpoint_tests_the_final_weights_with_one_warning(train: Callable, workspace: Path) -> None:
    write_table("table.csv", 40)
    result = train(*SMALL, *TABLE, "callbacks.checkpoint=null")
    assert result.exit_code == 0, result.output
    assert result.output.count("callbacks.checkpoint is null") == 1
    assert not list(result.folder.rglob("*.ckpt"))
    kept = train(*SMALL, *TABLE)  # one epoch, so the final weights are the best ones
    assert result.metrics["test/loss"] == kept.metrics["test/loss"]


@pytest.mark.parametrize("argument", ["trainer.logger=false", "+trainer.logger=false"])
def test_log_02_the_trainers_own_switch_names_ours(train: Callable, argument: str) -> None:
    result = train(argument)
    assert result.exit_code == 1
    assert "`trainer.logger` is set by Leyden. Use `logger` instead." in result.output


# ---- LOG-04: the axis ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulate", "steps_per_epoch"),
    [(1, 5), (2, 3), (8, 1)],  # 35 rows in batches of 8 are 5 batches; what is left at an epoch's end is a step
)
def test_log_04_epoch_values_lie_at_the_optimiser_steps_reached(
    train: Callable, workspace: Path, accumulate: int, steps_per_epoch: int
) -> None:
    rows = table_rows(35 + 9 + 9)
    for name, part in (("table", rows[:35]), ("val", rows[35:44]), ("test", rows[44:])):
        write_csv(f"{name}.csv", ("x1", "x2", "y"), part)
    result = train(
        *BOARD,
        *TABLE,
        "data.val_path=val.csv",
        "data.test_path=test.csv",
        "data.batch_size=8",
        "trainer.max_epochs=3",
        "trainer.log_every_n_steps=2",
        f"engine.accumulate_batches={accumulate}",
    )
    assert result.exit_code == 0, result.output
    total = 3 * steps_per_epoch
    points = scalars(read_events(result.folder))
    expected = [steps_per_epoch * epoch for epoch in (1, 2, 3)]
    for phase in ("train", "val"):
        for name in ("loss", "mse", "mae", "r2"):
            assert [step for step, _ in points[f"{phase}/{name}"]] == expected, f"{phase}/{name}"
    for name in ("loss", "mse", "mae", "r2"):
        assert {step for step, _ in points[f"test/{name}"]} == {total}
    # every second step of an epoch, and its last
    within = [step for step in range(1, steps_per_epoch + 1) if step % 2 == 0 or step == steps_per_epoch]
    logged = [start + step for start in (0, steps_per_epoch, 2 * steps_per_epoch) for step in within]
    assert [step for step, _ in points["train/loss_step"]] == logged
    assert [step for step, _ in points["train/lr"]] == logged
    assert max(step for tag in points for step, _ in points[tag]) == total
    saved = load_checkpoint(result.folder / "checkpoints" / "last.ckpt")
    assert saved.metrics["val/loss"] == pytest.approx(points["val/loss"][-1][1], rel=1e-6)
    history = pl.read_csv(result.folder / "history.csv", infer_schema_length=None)
    assert history.drop_nulls("val/loss")["step"].to_list() == expected


def test_log_04_validation_within_an_epoch_lies_where_it_ran(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", ("x1", "x2", "y"), table_rows(32))
    write_csv("val.csv", ("x1", "x2", "y"), table_rows(41)[32:])
    own = ("data.val_path=val.csv", "data.test_path=val.csv", "data.batch_size=8", "trainer.max_epochs=2")
    result = train(*BOARD, *TABLE, *own, "trainer.val_check_interval=2")
    assert result.exit_code == 0, result.output
    points = scalars(read_events(result.folder))
    assert [step for step, _ in points["val/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in points["train/loss"]] == [4, 8]


# ---- LOG-05: output to a file ----------------------------------------------------------------------------------


def assert_bounded(output: str, limit: int = 60) -> None:
    lines = output.splitlines()
    assert len(lines) < limit, f"{len(lines)} lines"
    # \x1b starts a colour or a movement of the cursor, \r and \x08 overwrite
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", output)
    assert max(map(len, lines)) < 400


@pytest.mark.parametrize(
    ("num_rows", "epochs"),
    [(1000, 1), (3, 100)],  # in batches of one row: one long epoch, many short ones
)
def test_log_05_many_batches_are_a_few_lines(train: Callable, workspace: Path, num_rows: int, epochs: int) -> None:
    write_csv("table.csv", ("x1", "x2", "y"), table_rows(num_rows))
    write_csv("test.csv", ("x1", "x2", "y"), table_rows(num_rows + 2)[num_rows:])
    own = ("data.val_frac=0", "data.test_path=test.csv", "data.batch_size=1", f"trainer.max_epochs={epochs}")
    more = ("callbacks.checkpoint=null", "trainer.log_every_n_steps=1000000")  # these take most of the time
    result = train(*SMALL, *TABLE, *own, *more)
    assert result.exit_code == 0, result.output
    assert_bounded(result.output)
    progress = [line for line in result.output.splitlines() if line.startswith("epoch ")]
    assert 1 <= len(progress) <= 21
    assert progress[-1].startswith(f"epoch {epochs}/{epochs} ")
    assert "samples/s" in progress[-1]
    assert_bounded((result.folder / "train.log").read_text(encoding="utf-8"))


def test_log_05_reading_many_pictures_and_skipping_many_stays_short(train: Callable, workspace: Path) -> None:
    write_pictures("pictures", {"ant": 280, "bee": 280}, size=2)
    for index in range(40):
        (Path("pictures") / "ant" / f"bad{index}.png").write_bytes(b"")
    few = ("trainer.limit_train_batches=1", "data.on_error=skip", "data.batch_size=64")
    result = train(*SMALL, *PICTURES, *few)
    assert result.exit_code == 0, result.output
    assert_bounded(result.output)
    assert "... and" in result.output
    assert "see `skipped` in run.json" in result.output
    assert len(result.record["skipped"]) >= 39  # equal files stay in one split, and all of them are empty


# ---- LOG-07: names of checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["val/r2", "train/loss", "test/mae"])
def test_log_07_checkpoint_names_are_flat_and_the_value_is_in_the_file(
    train: Callable, workspace: Path, metric: str
) -> None:
    write_table("table.csv", 60)
    mode = "max" if metric == "val/r2" else "min"
    result = train(*SMALL, *TABLE, "trainer.max_epochs=3", f"objective.metric={metric}", f"objective.mode={mode}")
    assert result.exit_code == 0, result.output
    folder = result.folder / "checkpoints"
    assert all(path.is_file() for path in folder.iterdir())
    # A metric of the test is known only after training, so there is no best one
    names = ["last-1.ckpt", "last.ckpt"] if metric == "test/mae" else ["best.ckpt", "last-1.ckpt", "last.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    if metric == "test/mae":
        assert result.output.count("`test/mae` is known only after training") == 1
        assert result.metrics["objective"] == result.metrics["test/mae"]
        return
    best = load_checkpoint(result.folder).metrics[metric]
    history = pl.read_csv(result.folder / "history.csv", infer_schema_length=None)[metric].drop_nulls()
    assert best == pytest.approx(history.max() if mode == "max" else history.min(), rel=1e-6)
    if metric == "val/r2":
        assert evaluate_run(result.folder, "val")[metric] == pytest.approx(best, abs=1e-6)
        assert result.metrics["objective"] == pytest.approx(best, rel=1e-6)


def test_log_07_objective_of_a_test_that_does_not_run_is_refused(train: Callable) -> None:
    result = train("objective.metric=test/mae", "test=false")
    assert result.exit_code == 1
    assert "`objective.metric` is 'test/mae', but `test` is false" in result.output
