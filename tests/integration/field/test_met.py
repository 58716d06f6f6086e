"""Metrics and losses: values over all rows, whatever the batches were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from field_data import PICTURES, SMALL, TABLE, TEXTS, table_rows, text_rows, write_csv, write_pictures
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, mean_squared_error, r2_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics import Metric

from leyden.engine.classification import ClassificationTask
from leyden.runs.evaluate import evaluate_run
from leyden.runs.predict import predict_file
from leyden.runs.restore import load_checkpoint, restore

NUM_TEST = 33
TEST_COUNTS = {"ant": 20, "bee": 9, "cat": 4}


def split_tables(header: tuple[str, ...], rows: list[list]) -> None:
    """table.csv for training, val.csv, test.csv with 33 rows; then the same test rows to predict for."""
    write_csv("train.csv", header, rows[:40])
    write_csv("val.csv", header, rows[40:49])
    write_csv("test.csv", header, rows[49 : 49 + NUM_TEST])


OWN_SPLITS = ("data.path=train.csv", "data.val_path=val.csv", "data.test_path=test.csv", "data.batch_size=8")


def write_split_pictures(counts: dict[str, dict[str, int]]) -> None:
    """pictures/SPLIT/CLASS/*.png."""
    for split, classes in counts.items():
        write_pictures(Path("pictures") / split, classes)


# ---- MET-01: every value is over all rows ----------------------------------------------------------------------


def assert_equal_for_all_batch_sizes(run: Path) -> dict[str, float]:
    """The test metrics of a run, after comparing them for several batch sizes."""
    found = {size: evaluate_run(run, "test", size) for size in BATCH_SIZES}
    for size, values in found.items():
        assert values == pytest.approx(found[NUM_TEST], abs=1e-6, rel=1e-6), f"batch size {size}"
    return found[NUM_TEST]


BATCH_SIZES = (1, 7, 8, NUM_TEST)


def test_met_01_regression_equals_scikit_learn_for_all_batch_sizes(train: Callable, workspace: Path) -> None:
    rows = table_rows(49 + NUM_TEST)
    split_tables(("x1", "x2", "y"), rows)
    result = train(*SMALL, *TABLE, *OWN_SPLITS)
    assert result.exit_code == 0, result.output
    values = assert_equal_for_all_batch_sizes(result.folder)
    logged = {name: value for name, value in result.metrics.items() if name.startswith("test/")}
    assert values == pytest.approx(logged, abs=1e-6, rel=1e-6)
    predicted = predict_file(result.folder, Path("test.csv"))["prediction"].to_list()
    target = [row[-1] for row in rows[49:]]
    std = np.std([row[-1] for row in rows[:40]])
    expected = {
        "test/mse": mean_squared_error(target, predicted),
        "test/mae": mean_absolute_error(target, predicted),
        "test/r2": r2_score(target, predicted),
        "test/loss": mean_squared_error(target, predicted) / std**2,  # the loss is on the standardised scale
    }
    assert values == pytest.approx(expected, abs=1e-5, rel=1e-5)


def assert_equals_scikit_learn(values: dict[str, float], label: list[str], predicted: pl.DataFrame) -> None:
    expected = {
        "test/accuracy": accuracy_score(label, predicted["prediction"].to_list()),
        "test/macro_f1": f1_score(label, predicted["prediction"].to_list(), average="macro"),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def cross_entropy(run: Path) -> float:
    """The mean over all test rows at once."""
    task, data = restore(load_checkpoint(run))
    data.setup("test")
    batch = data.transform_batch(data.splits["test"], None)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(task(batch), batch["label"].long()))


def test_met_01_vision_equals_scikit_learn_for_all_batch_sizes(train: Callable, workspace: Path) -> None:
    write_split_pictures({"train": {"ant": 9, "bee": 8, "cat": 6}, "val": {"ant": 2, "bee": 2}, "test": TEST_COUNTS})
    result = train(*SMALL, *PICTURES, "model.label_smoothing=0", "optim.lr=0.001")
    assert result.exit_code == 0, result.output
    values = assert_equal_for_all_batch_sizes(result.folder)
    assert values["test/accuracy"] == pytest.approx(result.metrics["test/accuracy"], abs=1e-6)
    predicted = predict_file(result.folder, Path("pictures/test"))
    assert_equals_scikit_learn(values, [Path(name).parent.name for name in predicted["id"]], predicted)
    assert values["test/loss"] == pytest.approx(cross_entropy(result.folder), abs=1e-6)


def test_met_01_text_equals_scikit_learn_for_all_batch_sizes(train: Callable, workspace: Path) -> None:
    rows = text_rows(49 + NUM_TEST)
    rows[60:70] = [[text, "up"] for text, _ in rows[60:70]]  # wrong labels, so that not all is right
    split_tables(("text", "label"), rows)
    result = train(*SMALL, *TEXTS, *OWN_SPLITS)
    assert result.exit_code == 0, result.output
    values = assert_equal_for_all_batch_sizes(result.folder)
    predicted = predict_file(result.folder, Path("test.csv"))
    assert_equals_scikit_learn(values, [label for _, label in rows[49:]], predicted)
    assert values["test/accuracy"] < 1
    assert values["test/loss"] == pytest.approx(cross_entropy(result.folder), abs=1e-6)


# ---- MET-02: R2 of a last batch of one row ---------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 1])
def test_met_02_r2_is_over_the_epoch_also_with_batches_of_one_row(
    train: Callable, workspace: Path, batch_size: int
) -> None:
    rows = table_rows(33 + 9 + 9)  # 33 = 4 x 8 + 1 and 9 = 8 + 1
    write_csv("train.csv", ("x1", "x2", "y"), rows[:33])
    write_csv("val.csv", ("x1", "x2", "y"), rows[33:42])
    write_csv("test.csv", ("x1", "x2", "y"), rows[42:])
    result = train(*SMALL, *TABLE, *OWN_SPLITS, f"data.batch_size={batch_size}", "trainer.log_every_n_steps=1")
    assert result.exit_code == 0, result.output
    for split, part in (("val", rows[33:42]), ("test", rows[42:])):
        predicted = predict_file(result.folder, Path(f"{split}.csv"))["prediction"].to_list()
        expected = r2_score([row[-1] for row in part], predicted)
        assert result.metrics[f"{split}/r2"] == pytest.approx(expected, abs=1e-5)
    history = pl.read_csv(result.folder / "history.csv", infer_schema_length=None)
    for split in ("train", "val", "test"):
        assert history[f"{split}/r2"].drop_nulls().len() == 1  # one epoch, so one value and none of a batch
    assert history["train/loss_step"].drop_nulls().len() == -(-33 // batch_size)


def test_met_02_split_of_one_row_is_refused_before_training(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", ("x1", "x2", "y"), table_rows(5))  # 15 % of 5 rows are 1 row
    result = train(*SMALL, *TABLE)
    assert result.exit_code == 1
    assert "DataError: The val split of table.csv has 1 row, but R2 needs at least 2." in result.output
    assert "data.val_frac" in result.output
    assert "Traceback" not in result.output


# ---- MET-03: a class that is not there -------------------------------------------------------------------------


def test_met_03_absent_class_does_not_lower_perfect_predictions(train: Callable, workspace: Path) -> None:
    write_split_pictures(
        {"train": {"ant": 8, "bee": 8, "cat": 8}, "val": {"bee": 3, "cat": 3}, "test": {"ant": 3, "cat": 2}}
    )
    result = train(*SMALL, *PICTURES, "trainer.max_epochs=15", "optim.lr=0.05", "model.label_smoothing=0")
    assert result.exit_code == 0, result.output
    # The classes are levels of grey far apart, so all predictions are right
    assert result.metrics["val/accuracy"] == result.metrics["test/accuracy"] == 1.0
    assert result.metrics["val/macro_f1"] == result.metrics["test/macro_f1"] == 1.0
    assert "a class that is in\n    neither does not lower it" in ClassificationTask.__doc__


def test_met_03_predicted_class_without_targets_counts(train: Callable) -> None:
    task = ClassificationTask(torch.nn.Identity(), torch.optim.SGD, None, 4, list("abcd"))
    metrics = task.build_metrics()
    metrics.update(torch.eye(4)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 1]))
    # F1 of a: 1, of b: 2 x 1 x 0.5 / 1.5 = 2/3, of c (predicted only): 0, d is in neither; mean of three
    assert float(metrics.compute()["macro_f1"]) == pytest.approx((1 + 2 / 3 + 0) / 3, abs=1e-6)


# ---- MET-05: the sanity check leaves no trace ------------------------------------------------------------------


def scalar_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> points of the run's event file."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=regression", "model.net.hidden_dim=8", "model.net.dropout=0.1"),
        (
            "experiment=vision_fashion_mnist_mlp",
            "data=digits",
            "model.net.hidden_dims=[8]",
        ),
    ],
)
def test_met_05_sanity_steps_change_nothing(train: Callable, arguments: tuple[str, ...]) -> None:
    common = ("hardware=cpu", "trainer.max_epochs=2", "trainer.log_every_n_steps=1", *arguments)
    without = train(*common, "trainer.num_sanity_val_steps=0")
    checked = train(*common, "trainer.num_sanity_val_steps=2")
    assert without.exit_code == checked.exit_code == 0, checked.output
    assert checked.metrics == without.metrics
    assert (checked.folder / "history.csv").read_text() == (without.folder / "history.csv").read_text()
    points = scalar_points(checked.folder)
    assert points == scalar_points(without.folder)
    assert len(points["val/loss"]) == 2
    saved = [load_checkpoint(result.folder / "checkpoints" / "best.ckpt") for result in (without, checked)]
    assert saved[0].metrics == saved[1].metrics


# ---- MET-07: shapes are never broadcast ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["y", "[y]"])
def test_met_07_target_of_one_column_has_the_shape_of_the_output(train: Callable, workspace: Path, target: str) -> None:
    rows = [[float(x), 2.0 * x] for x in range(-20, 20)]
    write_csv("table.csv", ("x", "y"), rows)
    line = ("model=regression_linear", "optim=sgd", "optim.lr=0.1", "trainer.max_epochs=40")
    arguments = [argument for argument in TABLE if not argument.startswith(("model.", "data.target"))]
    result = train(*SMALL, *arguments, f"data.target={target}", *line)
    assert result.exit_code == 0, result.output
    # y = 2x has no noise: right predictions give a loss of 0. Broadcast to all pairs it would be 2 var(y) / var(y) = 2
    assert result.metrics["test/loss"] == pytest.approx(0, abs=1e-3)
    assert result.metrics["test/r2"] == pytest.approx(1, abs=1e-3)


def test_met_07_several_targets_keep_their_columns(train: Callable, workspace: Path) -> None:
    write_csv("table.csv", ("x", "y", "z"), [[float(x), 2.0 * x, -5.0 * x] for x in range(-20, 20)])
    line = ("model=regression_linear", "optim=sgd", "optim.lr=0.1", "trainer.max_epochs=40")
    arguments = [argument for argument in TABLE if not argument.startswith(("model.", "data.target"))]
    result = train(*SMALL, *arguments, "data.target=[y,z]", *line)
    assert result.exit_code == 0, result.output
    assert result.metrics["test/loss"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        ("def forward(self, features): return self.head(features).squeeze(1)", "(2,)"),
        ("def forward(self, features): return self.head(features).unsqueeze(1)", "(2, 1, 1)"),
        ("def forward(self, features): return self.head(features).repeat(1, 3)", "(2, 3)"),
    ],
)
def test_met_07_output_of_another_shape_is_refused_with_both_shapes(
    train: Callable, workspace: Path, net: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"field_net_{abs(hash(net))}"
    (workspace / f"{name}.py").write_text(
        f"import torch\nclass Net(torch.nn.Module):\n  def __init__(self):\n    super().__init__()\n"
        f"    self.head = torch.nn.Linear(2, 1)\n  {net}\n"
    )
    monkeypatch.syspath_prepend(str(workspace))
    write_csv("table.csv", ("x1", "x2", "y"), table_rows(20))
    arguments = [argument for argument in TABLE if not argument.startswith("model.")]
    result = train(*SMALL, *arguments, f"model.net._target_={name}.Net")
    assert result.exit_code == 1, result.output
    assert "ConfigError" in result.output
    assert f"gives an output of shape {shape}, but the target is (2, 1)" in result.output


# ---- MET-08: metrics hold sums, not rows -----------------------------------------------------------------------


def metric_bytes(task: torch.nn.Module) -> int:
    """Bytes of the states of all metrics of a task."""
    total = 0
    for metric in (module for module in task.modules() if isinstance(module, Metric)):
        for name in metric._defaults:
            state = getattr(metric, name)
            tensors = state if isinstance(state, list) else [state]
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=regression",),
        ("experiment=vision_fashion_mnist_mlp", "data=digits"),
        ("experiment=nlp", "model.net.num_buckets=512", "trainer.limit_test_batches=2"),
    ],
)
def test_met_08_metrics_hold_as_much_after_an_epoch_as_before(train: Callable, arguments: tuple[str, ...]) -> None:
    result = train("debug=fast", "logger=null", *arguments)
    assert result.exit_code == 0, result.output
    task, data = restore(load_checkpoint(result.folder))
    task.setup("test")
    data.setup("test")
    empty = metric_bytes(task)
    assert empty > 0
    rows = {name: tensor[:16] for name, tensor in data.splits["test"].items()}
    batch = data.transform_batch(data.trim_batch(rows), None)
    with torch.no_grad():
        step = task.compute_loss(batch)
        for _ in range(50):
            task._update("test", *step, batch)
    assert metric_bytes(task) == empty
    first = task.compute_phase("test")
    task._update("test", *step, batch)
    assert task.compute_phase("test") == pytest.approx(first, rel=1e-5)  # reset, so equal rows give equal values
