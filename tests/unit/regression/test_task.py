"""The regression task: scikit-learn's metrics in the target's units, the loss on the standardised scale."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from task_contract import CONSTANT, SGD, TaskContract
from torch import Tensor

from leyden.data.loaders import Batch
from leyden.engine.task import Task
from leyden.errors import ConfigError
from leyden.regression.data import AutoMpg, LineData
from leyden.regression.nets import MLP, Linear
from leyden.regression.task import RegressionTask


def scores(outputs: Tensor, target: Tensor) -> dict[str, float]:
    return {
        "mse": mean_squared_error(target, outputs),
        "mae": mean_absolute_error(target, outputs),
        "r2": r2_score(target, outputs),
    }


class TestOneTarget(TaskContract):
    def build_task(self) -> Task:
        return RegressionTask(MLP(4, 1, hidden_dim=8), SGD, CONSTANT, target_mean=[20.0], target_std=[5.0])

    def draw_batch(self, num_rows: int) -> Batch:
        return {"features": torch.randn(num_rows, 4), "target": 20 + 5 * torch.randn(num_rows, 1)}

    def expected_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, float]:
        return scores(outputs, batch["target"])

    @torch.no_grad()
    def test_loss_is_on_the_standardised_scale(self, task: Task, batch: Batch) -> None:
        loss, outputs = task.compute_loss(batch)
        # ((output - target) / std)^2 with std 5
        assert float(loss) == pytest.approx(mean_squared_error(batch["target"], outputs) / 25, rel=1e-5)

    def test_outputs_are_in_the_targets_units(self, task: Task, batch: Batch) -> None:
        assert task(batch).equal(task.net(batch["features"]) * 5 + 20)
        assert task.compute_loss(batch)[1].equal(task(batch))


class TestTwoTargets(TaskContract):
    def build_task(self) -> Task:
        return RegressionTask(Linear(4, 2), SGD, CONSTANT, target_mean=[20.0, -1.0], target_std=[5.0, 0.1])

    def draw_batch(self, num_rows: int) -> Batch:
        target = torch.tensor([20.0, -1.0]) + torch.randn(num_rows, 2) * torch.tensor([5.0, 0.1])
        return {"features": torch.randn(num_rows, 4), "target": target}

    def expected_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, float]:
        return scores(outputs, batch["target"])

    def test_predictions_have_a_column_per_target(self, task: Task) -> None:
        assert task.predictions(torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == {
            "prediction_0": [1.0, 3.0],
            "prediction_1": [2.0, 4.0],
        }


def build(net: torch.nn.Module, mean: float = 0.0, std: float = 1.0) -> RegressionTask:
    task = RegressionTask(net, SGD, CONSTANT, target_mean=[mean], target_std=[std])
    task.setup()
    return task.eval()


def test_r2_of_large_targets_keeps_its_precision() -> None:
    """float32 sums of squares of values near 10,000 would lose the variance of 1."""
    torch.manual_seed(0)
    target = 10_000 + torch.randn(200, 1)
    task = build(Linear(1, 1), mean=10_000.0, std=1.0)
    metrics = task.build_metrics()
    outputs = target + 0.5 * torch.randn(200, 1)
    for part in range(0, 200, 20):
        metrics.update(outputs[part : part + 20], target[part : part + 20])
    expected = r2_score(target.double(), outputs.double())
    assert float(metrics.compute()["r2"]) == pytest.approx(expected, abs=1e-4)


def test_baseline_is_the_mean_of_the_training_targets() -> None:
    task = build(Linear(1, 1), mean=3.5, std=2.0)
    name, outputs = task.baseline_outputs(LineData(), 3)
    assert name == "mean predictor"
    assert outputs.tolist() == [[3.5], [3.5], [3.5]]


@pytest.mark.parametrize(("num_outputs", "shape"), [(2, "(5, 2)"), (3, "(5, 3)")])
def test_another_number_of_outputs_is_an_error_and_never_broadcast(num_outputs: int, shape: str) -> None:
    batch = {"features": torch.randn(5, 2), "target": torch.randn(5, 1)}
    with pytest.raises(ConfigError) as caught:
        build(Linear(2, num_outputs)).compute_loss(batch)
    message = str(caught.value)
    assert f"`model.net` gives an output of shape {shape}, but the target is (5, 1)." in message
    assert "Give the network num_targets=1 outputs; shapes are never broadcast." in message


def test_squeezed_output_is_an_error() -> None:
    class Squeezed(Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features).squeeze(1)

    with pytest.raises(ConfigError, match=r"output of shape \(5,\), but the target is \(5, 1\)"):
        build(Squeezed(2, 1)).compute_loss({"features": torch.randn(5, 2), "target": torch.randn(5, 1)})


def test_coefficients_are_in_the_datas_own_units() -> None:
    """The least-squares solution on standardised features, read back, is scikit-learn's on the raw table."""
    data = AutoMpg()
    data.setup()
    train = data.splits["train"]
    mean, std = data.facts["target_mean"], data.facts["target_std"]
    task = RegressionTask(Linear(9, 1), SGD, CONSTANT, mean, std)
    standardised = (train["target"].double() - mean[0]) / std[0]
    fitted = LinearRegression().fit(train["features"].double(), standardised)
    with torch.no_grad():
        task.net.head.weight.copy_(torch.from_numpy(fitted.coef_))  # type: ignore[operator, union-attr]
        task.net.head.bias.copy_(torch.from_numpy(fitted.intercept_))  # type: ignore[operator, union-attr]
    frame = data._split_frames()["train"]
    raw = torch.tensor(
        [[float(v) for v in frame[name].to_list()] for name in data.encoder.numeric], dtype=torch.float64
    ).T
    expected = LinearRegression().fit(
        torch.cat([raw, train["features"][:, 6:].double()], dim=1), train["target"].double()
    )
    summary = task.summary(data)
    named = {
        f"coefficient/{name}": value for name, value in zip(data.encoder.feature_names, expected.coef_[0], strict=True)
    }
    bias = {"coefficient/bias": float(expected.intercept_[0])}
    assert summary == pytest.approx(named | bias, rel=2e-3, abs=2e-3)


def test_other_networks_have_no_coefficients() -> None:
    data = LineData()
    data.setup()
    assert build(MLP(1, 1)).summary(data) == {}
    assert RegressionTask(Linear(1, 2), SGD, CONSTANT, [0.0, 0.0], [1.0, 1.0]).summary(data) == {}


def test_the_line_is_found_exactly() -> None:
    """y = 2x has weight 2 and bias 0 in its own units, which is 1 and 0 on the standardised scale."""
    data = LineData()
    data.setup()
    task = RegressionTask(Linear(1, 1), SGD, CONSTANT, data.facts["target_mean"], data.facts["target_std"])
    with torch.no_grad():
        task.net.head.weight.fill_(1.0)  # type: ignore[operator, union-attr]
        task.net.head.bias.fill_(0.0)  # type: ignore[operator, union-attr]
    assert task.summary(data) == pytest.approx({"coefficient/x": 2.0, "coefficient/bias": 0.0}, abs=1e-5)
