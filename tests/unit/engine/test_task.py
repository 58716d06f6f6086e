"""The base task in Lightning's own loop: what is logged and when, schedules, seeds, and values that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from sklearn.metrics import mean_squared_error
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.rng import seed_step
from leyden.engine.schedule import Constant, Cosine, Schedule
from leyden.engine.settings import PLAIN_STEP
from leyden.engine.task import Task
from leyden.errors import TrainingError

pytestmark = [
    # Lightning 2.6 with torch 2.12 and later
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
]


class Line(Task):
    """One weight and one bias for y."""

    metric_names = ("mse",)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self(batch)
        return F.mse_loss(outputs, batch["target"]), outputs

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]


class Points(DataModule):
    """y = 3x - 1 with noise: 10 rows for training, 5 for validation, 7 for the test."""

    label_key = "target"

    def load_splits(self) -> dict[str, Batch]:
        generator = torch.Generator().manual_seed(0)
        splits = {}
        for name, count in {"train": 10, "val": 5, "test": 7}.items():
            x = torch.randn(count, 1, generator=generator)
            splits[name] = {"input": x, "target": 3 * x - 1 + 0.1 * torch.randn(count, 1, generator=generator)}
        return splits


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((-1 if step is None else step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def column(self, name: str) -> dict[int, float]:
        """Step -> value."""
        found = [(step, row[name]) for step, row in self.rows if name in row]
        assert len(dict(found)) == len(found), f"{name} is logged twice at one step: {found}"
        return dict(found)


def build(lr: float = 0.1, schedule: Schedule | None = None, net: nn.Module | None = None, seed: int = 0) -> Line:
    seed_everything(0, verbose=False)
    return Line(net or nn.Linear(1, 1), partial(torch.optim.SGD, lr=lr), schedule or Constant(), seed)


def fit(task: Task, data: DataModule | None = None, **changes: Any) -> tuple[Trainer, Memory]:
    memory = Memory()
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "logger": memory,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "barebones": False,
    }
    trainer = Trainer(**(settings | changes))
    trainer.fit(task, datamodule=data or Points(batch_size=4))
    return trainer, memory


def by_hand(
    num_epochs: int, lr: float = 0.1, batch_size: int = 4, factors: Any = None
) -> tuple[nn.Linear, list[float]]:
    """The same training as a plain loop, and the loss of every batch."""
    data = Points(batch_size=batch_size)
    data.setup()
    seed_everything(0, verbose=False)
    net, losses = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loader = data.train_dataloader()
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in loader:
            if factors is not None:
                optimizer.param_groups[0]["lr"] = lr * factors[len(losses)]
            loss = F.mse_loss(net(batch["input"]), batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return net, losses


def test_training_is_that_of_a_plain_loop() -> None:
    task = build()
    _, memory = fit(task)
    net, losses = by_hand(num_epochs=2)
    torch.testing.assert_close(task.net.weight, net.weight)
    torch.testing.assert_close(task.net.bias, net.bias)
    # 10 rows in batches of 4: three steps an epoch
    assert memory.column("train/loss_step") == pytest.approx(dict(enumerate(losses, 1)), rel=1e-5)
    # The loss of an epoch is the mean over its rows, 4 + 4 + 2 of them.
    means = [(4 * a + 4 * b + 2 * c) / 10 for a, b, c in (losses[:3], losses[3:])]
    assert memory.column("train/loss") == pytest.approx({3: means[0], 6: means[1]}, rel=1e-5)
    epochs = [(step, row["epoch"]) for step, row in memory.rows if "train/loss" in row or "val/loss" in row]
    assert epochs == [(3, 0.0), (3, 0.0), (6, 1.0), (6, 1.0)]


def test_validation_and_test_are_over_all_rows() -> None:
    task = build()
    trainer, memory = fit(task)
    data = Points(batch_size=4)
    trainer.test(task, datamodule=data, verbose=False)
    for phase in ("val", "test"):
        rows = data.splits[phase]
        with torch.no_grad():
            expected = mean_squared_error(rows["target"], task.eval()(rows))
        assert memory.column(f"{phase}/mse")[6] == pytest.approx(expected, rel=1e-5)
        assert memory.column(f"{phase}/loss")[6] == pytest.approx(expected, rel=1e-5)
    assert float(trainer.callback_metrics["test/mse"]) == memory.column("test/mse")[6]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 3, 5, 6]), (50, [3, 6])])
def test_loss_is_logged_every_so_many_steps_of_an_epoch_as_the_mean_since(every: int, steps: list[int]) -> None:
    _, memory = fit(build(), log_every_n_steps=every)
    _, losses = by_hand(num_epochs=2)
    sizes = [4, 4, 2, 4, 4, 2]
    spans = [slice(start, stop) for start, stop in pairwise([0, *steps])]
    means = [np.average(losses[span], weights=sizes[span]) for span in spans]
    assert memory.column("train/loss_step") == pytest.approx(dict(zip(steps, means, strict=True)), rel=1e-5)


def test_accumulated_batches_are_logged_once_a_step() -> None:
    task = build()
    task.engine = replace(PLAIN_STEP, accumulate_batches=2)
    _, memory = fit(task, Points(batch_size=2))
    # Five batches an epoch: two steps of two batches and one of the last batch alone.
    assert list(memory.column("train/loss_step")) == [1, 2, 3, 4, 5, 6]


def test_rate_follows_the_schedule_over_optimiser_steps() -> None:
    schedule = Cosine(final_frac=0.1)
    _, memory = fit(build(schedule=schedule))
    # What is logged after a step is the rate it was taken with; steps count from 0.
    expected = {step + 1: 0.1 * schedule.factor(step, 6) for step in range(6)}
    assert memory.column("train/lr") == pytest.approx(expected)
    task = build(schedule=schedule)
    fit(task)
    net, _ = by_hand(num_epochs=2, factors=[schedule.factor(step, 6) for step in range(6)])
    torch.testing.assert_close(task.net.weight, net.weight)


def test_schedule_counts_steps_and_not_batches() -> None:
    task = build(schedule=Cosine(final_frac=0.5))
    task.engine = replace(PLAIN_STEP, accumulate_batches=2)
    trainer, _ = fit(task, Points(batch_size=2))
    assert trainer.global_step == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)  # the final value, at the sixth step


def test_sanity_check_does_not_count() -> None:
    _, plain = fit(build())
    _, checked = fit(build(), num_sanity_val_steps=2)
    assert checked.rows == plain.rows


def test_metrics_are_kept_for_the_progress_bar() -> None:
    task = build()
    _, memory = fit(task)
    assert task.latest == {
        "loss": memory.column("train/loss")[6],
        "val/mse": memory.column("val/mse")[6],
    }


def test_dropout_depends_on_seed_and_step_and_not_on_validation() -> None:
    def weights(seed: int = 0, **changes: Any) -> list[float]:
        seed_everything(0, verbose=False)
        task = build(net=nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.5), nn.Linear(16, 1)), seed=seed, lr=0.01)
        fit(task, **changes)
        return torch.cat([parameter.flatten() for parameter in task.parameters()]).tolist()

    first = weights()
    assert weights() == first
    assert weights(num_sanity_val_steps=2) == first
    assert weights(limit_val_batches=0) == first
    assert weights(seed=1) != first


class Drawing(nn.Linear):
    """Notes a number from torch's global generator in each training step."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.drawn: list[float] = []

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(float(torch.rand(1)))
        return super().forward(input)


def test_every_batch_has_random_numbers_of_its_own() -> None:
    net = Drawing()
    fit(build(net=net, seed=7))
    expected = []
    for position in range(6):
        seed_step(7, position)
        expected.append(float(torch.rand(1)))
    assert net.drawn == expected
    assert len(set(expected)) == 6


class Poison(Points):
    """Row 0 of a split has a target that is not finite."""

    def __init__(self, split: str, value: float) -> None:
        super().__init__(batch_size=4)
        self.poisoned, self.value = split, value

    def load_splits(self) -> dict[str, Batch]:
        splits = super().load_splits()
        splits[self.poisoned]["target"][0] = self.value
        return splits


@pytest.mark.parametrize(
    ("split", "name", "every"),
    [("train", "train/loss_step", 1), ("train", "train/loss_step", 50), ("val", "val/loss", 50)],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops_training(split: str, name: str, every: int, value: float) -> None:
    with pytest.raises(TrainingError) as caught:
        fit(build(), Poison(split, value), log_every_n_steps=every, limit_val_batches=1.0 if split == "val" else 0)
    message = str(caught.value)
    assert f"`{name}` is" in message
    assert "so training stopped." in message
    assert "Lower optim.lr, set engine.gradient_clip_norm, or look for extreme values in the data." in message


def test_diverging_training_names_the_last_finite_loss() -> None:
    task = build(lr=1e12)
    with pytest.raises(TrainingError) as caught:
        fit(task, max_epochs=20)
    assert task.guard.last_finite is not None
    step, loss = task.guard.last_finite
    assert step >= 1
    assert f"The last finite training loss was {loss:.6g} at step {step}." in str(caught.value)
    assert f"at step {step + 1}, so training stopped" in str(caught.value)


def test_metric_that_is_not_finite_does_not_stop_training() -> None:
    """R2 of one row is not a number, for one; the end of the run says so."""
    task = build()
    fit(task)
    assert task.guard.check_values({"val/r2": math.nan, "val/loss": 1.0}) is None  # type: ignore[func-returns-value]
    with pytest.raises(TrainingError, match="`val/loss` is nan at step 6"):
        task.guard.check_values({"val/loss": math.nan})


def test_metrics_other_than_promised_are_a_fault_of_the_task() -> None:
    task = build()
    task.metric_names = ("mse", "mae")  # type: ignore[misc]
    task.setup()
    task.validation_step({"input": torch.zeros(2, 1), "target": torch.zeros(2, 1)}, 0)
    with pytest.raises(AssertionError, match="build_metrics and metric_names differ"):
        task.compute_phase("val")


def test_prediction_is_the_forward_pass() -> None:
    task = build()
    batch = {"input": torch.randn(3, 1)}
    assert task.predict_step(batch).equal(task(batch))
    assert task.summary(Points(1)) == {}
    assert task.draw() == {}
