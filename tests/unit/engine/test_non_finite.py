"""Losses and gradients that are not finite: the step is named with its cause, or left out without a trace."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.callbacks.checkpoint import Checkpoint
from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine import non_finite
from leyden.engine.checkpoint import CheckpointWriter
from leyden.engine.schedule import Constant, Cosine
from leyden.engine.settings import PLAIN_STEP
from leyden.engine.task import Task
from leyden.errors import TrainingError
from leyden.runner import quiet_libraries

SKIP = replace(PLAIN_STEP, non_finite="skip", max_skipped_steps=2)


class Points(DataModule):
    """40 rows; `poisoned` ones hold NaN."""

    poisoned: tuple[int, ...] = ()

    def load_splits(self) -> dict[str, Batch]:
        generator = torch.Generator().manual_seed(3)
        rows = {n: torch.randn(40, k, generator=generator) for n, k in (("input", 3), ("target", 2))}
        clean = {name: tensor.clone() for name, tensor in rows.items()}
        for row in self.poisoned:
            rows["input"][row, 1] = math.nan
        return {"train": rows, "val": clean, "test": clean}


class Fit(Task):
    """Its loss, or its gradient alone, is not finite at the steps given (from 1)."""

    metric_names = ("mse",)
    bad_losses: tuple[int, ...] = ()
    bad_gradients: tuple[int, ...] = ()

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self(batch)
        loss = (output - batch["target"]).pow(2).mean()
        if self.training and self.trainer.global_step + 1 in self.bad_losses:
            loss = loss * math.nan
        if self.training and self.trainer.global_step + 1 in self.bad_gradients:
            zero = next(self.net.parameters()).sum() * 0.0
            loss = loss + zero.abs().sqrt()  # the slope of a root at zero is infinite, times zero is NaN
        return loss, output

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]


def build(engine: Any = PLAIN_STEP, norm: bool = False) -> Fit:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Linear(4, 2)]
    task = Fit(nn.Sequential(*layers), partial(torch.optim.AdamW, lr=0.01, fused=True), Constant())
    task.engine = engine
    return task


def fit(folder: Path, task: Fit, poisoned: tuple[int, ...] = (), **options: Any) -> Trainer:
    quiet_libraries()
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 10,
        "log_every_n_steps": 10,
        "logger": False,
        "callbacks": [Checkpoint(monitor="val/loss", mode="min")],
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "plugins": [CheckpointWriter()],
        "num_sanity_val_steps": 0,
    }
    data = Points(batch_size=8, seed=1)
    data.poisoned = poisoned
    trainer = Trainer(**(settings | options))
    trainer.fit(task, datamodule=data)
    return trainer


@pytest.fixture(params=["each step is read", "the device notes it"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator does, where the host must not wait at each step, can be done on a CPU too."""
    monkeypatch.setattr(non_finite, "reads_each_step", lambda task: request.param == "each step is read")


def weights_of(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("every", [1, 7, 50])
def test_first_bad_step_is_named_and_the_last_good_checkpoint_stays(tmp_path: Path, every: int) -> None:
    task = build()
    task.bad_losses = (37,)
    with pytest.raises(TrainingError) as caught:
        fit(tmp_path, task, log_every_n_steps=every)
    message = str(caught.value)
    # 40 rows in batches of 8: five steps an epoch, so step 37 is the second of the eighth
    assert re.match(r"`train/loss_step` is (nan|not finite) at step 37, so training stopped\.", message)
    last = re.search(r"The last finite training loss was ([\d.e-]+) at step (\d+)\.", message)
    assert last
    assert int(last.group(2)) in (36, 35)  # where nothing is read at each step, the end of the seventh epoch
    assert "The samples are finite (|input| up to " in message
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert f"The last good checkpoint: {path}." in message
    content = torch.load(path, weights_only=True)
    assert content["global_step"] == 35
    for name in ("last", "best"):
        weights = weights_of(tmp_path / "checkpoints" / f"{name}.ckpt")
        assert all(t.isfinite().all() for t in weights.values() if t.is_floating_point())


def test_weights_are_those_before_the_bad_step(tmp_path: Path) -> None:
    task, shorter = build(), build()
    task.bad_losses = (37,)
    with pytest.raises(TrainingError):
        fit(tmp_path / "a", task)
    fit(tmp_path / "b", shorter, max_steps=36)
    for a, b in zip(task.net.parameters(), shorter.net.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.usefixtures("_both_ways")
def test_bad_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        fit(tmp_path, build(), poisoned=(17,))
    data = Points(batch_size=8, seed=1)
    data.setup()
    order = [batch["input"] for batch in data.train_dataloader().batches()]
    row = data.splits["train"]["input"][17]
    step = 1 + next(index for index, batch in enumerate(order) if (batch == row).all(dim=1).any())
    assert f"at step {step}, so training stopped." in str(caught.value)
    assert "`input` is not finite in training sample(s) 17 (counted from 0)." in str(caught.value)
    assert "The last good checkpoint: none yet." in str(caught.value)


@pytest.mark.usefixtures("_both_ways")
def test_bad_weights_are_named(tmp_path: Path) -> None:
    task = build()
    task.bad_gradients = (3,)  # breaks the weights, so the loss of step 4 is not finite
    with pytest.raises(TrainingError) as caught:
        fit(tmp_path, task)
    assert "at step 4, so training stopped." in str(caught.value)
    assert "The weights `net.0.weight` are not finite." in str(caught.value)


def test_micro_batch_is_named(tmp_path: Path) -> None:
    task = build(replace(PLAIN_STEP, micro_batch_size=3))
    with pytest.raises(TrainingError, match=r"It is micro-batch [123] of the step\.|so training stopped\. `input`"):
        fit(tmp_path, task, poisoned=(17,))


@pytest.mark.usefixtures("_both_ways")
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """The last step of an epoch breaks the weights while every loss so far is finite."""
    task = build()
    task.bad_gradients = (10,)
    with pytest.raises(TrainingError, match=r"`net\.0\.weight` is not finite after step 10, so no checkpoint"):
        fit(tmp_path, task, limit_val_batches=0, callbacks=[Checkpoint(None, "min", min_interval_s=0)])
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 5


# ---- skipping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["bad_losses", "bad_gradients"])
def test_skipped_step_leaves_no_trace(tmp_path: Path, fault: str) -> None:
    """By hand: the same steps without an update at the seventh."""
    task = build(SKIP, norm=True)
    setattr(task, fault, (7,))
    states: dict[int, Any] = {}

    class Watched(Checkpoint):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            state = {"net": module.net.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]}
            states[trainer.global_step] = copy.deepcopy(state)

    trainer = fit(tmp_path, task, max_epochs=2, callbacks=[Watched(monitor=None, mode="min")])
    assert trainer.global_step == 10
    assert task.guard.num_skipped == 1
    before, after, later = (states[step] for step in (6, 7, 8))
    for name, value in before["net"].items():
        assert after["net"][name].equal(value), name
        assert value.isfinite().all()
    assert any(not later["net"][name].equal(value) for name, value in before["net"].items())
    for index, state in before["optimizer"].items():
        for name, value in state.items():
            assert after["optimizer"][index][name].equal(value), name


def test_skipped_steps_do_not_count_for_the_schedule(tmp_path: Path) -> None:
    task = build(SKIP)
    task.schedule = Cosine()
    task.bad_losses = (3, 4)
    rates: list[float] = []

    class Watched(Checkpoint):
        def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = fit(tmp_path, task, max_epochs=2, callbacks=[Watched(monitor=None, mode="min")])
    assert trainer.global_step == 10
    full = trainer.optimizers[0].param_groups[0]["initial_lr"]
    assert rates == [full * task.schedule.factor(step, 10) for step in (0, 1, 2, 2, 2, 3, 4, 5, 6, 7)]


def test_skipped_steps_count_in_no_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = build(SKIP)
    task.bad_losses = (2, 3)
    trainer = fit(tmp_path, task, max_epochs=1)
    assert math.isfinite(float(trainer.callback_metrics["train/loss"]))
    assert "Step 2 is skipped: The samples are finite" in caplog.text
    assert "Step 3 is skipped" not in caplog.text  # one line for a row of them


def test_too_many_skipped_steps_in_a_row_stop_training(tmp_path: Path) -> None:
    task = build(SKIP)
    task.bad_losses = (2, 3, 5, 6, 8, 9, 10)  # two in a row are allowed
    with pytest.raises(TrainingError) as caught:
        fit(tmp_path, task)
    assert "The loss or gradient was not finite in 3 steps in a row, up to step 10;" in str(caught.value)
    assert "engine.max_skipped_steps allows 2." in str(caught.value)


def test_interval_of_skipped_steps_is_not_logged_and_a_whole_epoch_stops(tmp_path: Path) -> None:
    task = build(replace(SKIP, max_skipped_steps=100))
    task.bad_losses = (3, 4, 6, 7, 8, 9, 10)
    with pytest.raises(TrainingError, match=r"All steps of epoch 2 were skipped\."):
        fit(tmp_path, task, log_every_n_steps=1)
    assert task.guard.last_finite is not None
    assert task.guard.last_finite[0] == 5


def test_skipping_changes_nothing_where_all_is_finite(tmp_path: Path) -> None:
    plain, careful = build(norm=True), build(SKIP, norm=True)
    fit(tmp_path / "a", plain, max_epochs=2)
    fit(tmp_path / "b", careful, max_epochs=2)
    for a, b in zip(plain.net.state_dict().values(), careful.net.state_dict().values(), strict=True):
        assert a.equal(b)
