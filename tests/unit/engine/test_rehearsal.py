"""Steps before training: they are like those of training, and nothing shows that they were taken."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine import rehearsal
from leyden.engine.rehearsal import rehearse
from leyden.engine.schedule import Constant
from leyden.engine.settings import PLAIN_STEP
from leyden.engine.task import Task
from leyden.engine.threads import ThreadChoice, choose_threads, decide


class Points(DataModule):
    def load_splits(self) -> dict[str, Batch]:
        rows = {"input": torch.randn(20, 3), "target": torch.randn(20, 2)}
        return {"train": rows, "val": rows, "test": rows}


class Fit(Task):
    metric_names = ("mse",)

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        how = (len(batch["input"]), self.net.training, torch.is_autocast_enabled("cpu"))
        self.seen = [*getattr(self, "seen", []), how]
        output = self(batch)
        return (output - batch["target"]).square().mean(), output


@pytest.fixture
def data() -> DataModule:
    data = Points(batch_size=8)
    data.setup()
    return data


@pytest.fixture
def task() -> Fit:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return Fit(net, partial(torch.optim.SGD, lr=0.1), Constant())


def build_trainer(folder: Path, precision: str = "32-true") -> Trainer:
    return Trainer(accelerator="cpu", logger=False, precision=precision, default_root_dir=folder)


def test_nothing_shows(task: Fit, data: DataModule, tmp_path: Path) -> None:
    task.eval()
    before, generator = copy.deepcopy(task.state_dict()), torch.get_rng_state()
    times = rehearse(task, data, build_trainer(tmp_path), 3)
    assert len(times) == 3
    assert min(times) > 0
    assert all(value.equal(before[name]) for name, value in task.state_dict().items())
    assert torch.get_rng_state().equal(generator)
    assert all(p.grad is None for p in task.parameters())
    assert not task.training


def test_steps_are_those_of_training(task: Fit, data: DataModule, tmp_path: Path) -> None:
    task.engine = replace(PLAIN_STEP, micro_batch_size=3)
    rehearse(task, data, build_trainer(tmp_path, "bf16-mixed"), 1)
    assert task.seen == [(3, True, True), (3, True, True), (2, True, True)]  # 8 rows


def test_long_steps_are_taken_once(
    task: Fit, data: DataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "ENOUGH_S", 0.0)
    assert len(rehearse(task, data, build_trainer(tmp_path), 5)) == 1


def test_threads_have_to_be_worthwhile() -> None:
    # a tenth less time, or more
    assert decide({1: 1.0, 8: 0.89}) == 8
    assert decide({1: 1.0, 8: 0.91}) == 1
    assert decide({1: 1.0, 8: 3.0}) == 1


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(("times", "chosen"), [({1: 2e-3, 2: 1e-3}, 2), ({1: 1e-3, 2: 2e-3}, 1)])
def test_quicker_number_is_set_and_logged(
    task: Fit,
    data: DataModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: dict[int, float],
    chosen: int,
) -> None:
    monkeypatch.setattr("leyden.engine.threads.measure", lambda task, data, trainer, number: times[number])
    task.thread_choice = ThreadChoice()
    with caplog.at_level("INFO"):
        choose_threads(task, data, build_trainer(tmp_path))
    assert torch.get_num_threads() == chosen
    shown = ", ".join(f"{1e3 * time:.2f} ms a step with {number}" for number, time in times.items())
    assert caplog.messages[-1] == f"CPU threads of an operator: {chosen} ({shown})."


@pytest.mark.usefixtures("_two_threads")
def test_measuring_leaves_the_choice_to_the_times(task: Fit, data: DataModule, tmp_path: Path) -> None:
    task.thread_choice = ThreadChoice()
    choose_threads(task, data, build_trainer(tmp_path))
    assert torch.get_num_threads() in (1, 2)
    assert len(task.seen) == 2 * (1 + 7)


def test_nothing_is_measured_where_nothing_is_to_choose(
    task: Fit, data: DataModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    choose_threads(task, data, build_trainer(tmp_path))
    assert torch.get_num_threads() == threads
    assert not hasattr(task, "seen")
    assert "CPU threads" not in caplog.text
