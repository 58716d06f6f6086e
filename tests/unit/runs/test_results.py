"""The numbers that end a run: the baseline by scikit-learn's dummies, probes, and the table."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, mean_squared_error, r2_score

from leyden.engine.schedule import Constant
from leyden.regression.data import AutoMpg, LineData
from leyden.regression.nets import Linear
from leyden.regression.task import RegressionTask
from leyden.runs.results import build_table, compute_baseline, predict_probes
from leyden.vision.data import Digits
from leyden.vision.nets import MLP
from leyden.vision.task import VisionTask

SGD = partial(torch.optim.SGD, lr=0.1)


def test_baseline_of_a_regression_is_scikit_learns_mean() -> None:
    data = AutoMpg()
    data.setup()
    net = Linear(data.facts["num_features"], 1)
    task = RegressionTask(net, SGD, Constant(), data.facts["target_mean"], data.facts["target_std"])
    name, values = compute_baseline(task, data)
    train, test = data.splits["train"], data.splits["test"]
    predicted = DummyRegressor(strategy="mean").fit(train["features"], train["target"]).predict(test["features"])
    assert name == "mean predictor"
    assert values == pytest.approx(
        {
            "mse": mean_squared_error(test["target"], predicted),
            "mae": mean_absolute_error(test["target"], predicted),
            "r2": r2_score(test["target"], predicted),
        },
        rel=1e-4,
        abs=1e-5,
    )


def test_baseline_of_a_classification_is_scikit_learns_most_frequent() -> None:
    data = Digits()
    data.setup()
    names = data.facts["class_names"]
    task = VisionTask(MLP(10, 1, 8, hidden_dims=(4,)), SGD, Constant(), num_classes=10, class_names=names)
    name, values = compute_baseline(task, data)
    train, test = data.splits["train"], data.splits["test"]
    dummy = DummyClassifier(strategy="most_frequent").fit(train["label"], train["label"])
    predicted = dummy.predict(test["label"])
    assert name == f"always '{names[predicted[0]]}'"
    assert values == pytest.approx(
        {
            "accuracy": accuracy_score(test["label"], predicted),
            "macro_f1": f1_score(test["label"], predicted, average="macro", zero_division=0),
        }
    )


def test_probes_are_predicted_by_name() -> None:
    data = LineData()
    data.setup()
    task = RegressionTask(Linear(1, 1), SGD, Constant(), data.facts["target_mean"], data.facts["target_std"])
    with torch.no_grad():
        task.net.head.weight.fill_(1.0)  # type: ignore[operator, union-attr]
        task.net.head.bias.fill_(0.0)  # type: ignore[operator, union-attr]
    # y = 2x is weight 1 and bias 0 on the standardised scale, so x = 4 gives 8.
    assert predict_probes(task, data) == pytest.approx({"predict/4.0": 8.0}, abs=1e-5)
    digits = Digits()
    digits.setup()
    assert predict_probes(task, digits) == {}


def cells(text: str) -> list[list[str]]:
    rows = [line[1:-1].replace("┃", "│").split("│") for line in text.splitlines() if line[:1] in "┃│"]
    return [[cell.strip() for cell in row] for row in rows]


def test_table_shows_run_baseline_and_known_result_side_by_side() -> None:
    results = {"test/loss": 0.5, "test/r2": 0.87654, "val/r2": 0.9, "predict/4.0": 8.0, "coefficient/x": 2.0}
    text = build_table(results, ("mean predictor", {"r2": -0.01}), {"label": "ridge", "r2": 0.8}, ["r2"])
    assert cells(text) == [
        ["metric", "this run", "mean predictor", "ridge"],
        ["r2", "0.8765", "-0.0100", "0.8000"],
        ["loss", "0.5000", "", ""],
    ]
    assert text.splitlines()[-2:] == ["predict/4.0 = 8.0000", "coefficient/x = 2.0000"]
    assert "val/r2" not in text


def test_table_without_baseline_and_known_result() -> None:
    assert cells(build_table({"test/loss": 0.5}, None, None)) == [["metric", "this run"], ["loss", "0.5000"]]


def test_run_without_a_test_has_no_table() -> None:
    assert build_table({"val/loss": 0.5}, None, {"label": "ridge"}) == ""
