"""Progress: a bounded number of lines in files, a bar on terminals, the same numbers in both."""

from __future__ import annotations

import io
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from rich.console import Console

from leyden.callbacks import progress as module
from leyden.callbacks.progress import MAX_LINES, Progress

BATCH = {"x": torch.zeros(10, 2)}


def strategy(num_processes: int) -> Any:
    return SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_processes, "rank": 0})


def trainer(max_epochs: int | None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": max_epochs,
        "max_steps": -1,
        "current_epoch": 0,
        "strategy": strategy(1),
        "estimated_stepping_batches": float("inf") if max_epochs is None else 2 * max_epochs,
        "global_step": 0,
        "is_global_zero": True,
    }
    return SimpleNamespace(**(settings | changes))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.latest = {"val/accuracy": 0.98762, "loss": 0.12345, "val/f1": 0.5}


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def train(callback: Progress, state: Any, num_epochs: int, clock: Clock) -> None:
    """Two batches of 10 rows in 4 s an epoch, and 100 s of validation that must not count."""
    net = Module()
    callback.on_train_start(state, net)
    for epoch in range(num_epochs):
        state.current_epoch = epoch
        callback.on_train_epoch_start(state, net)
        for index in range(2):
            clock.now += 2.0
            state.global_step += 1
            callback.on_train_batch_end(state, net, None, BATCH, index)
        callback.on_validation_start(state, net)
        clock.now += 100.0
        callback.on_validation_end(state, net)
        callback.on_train_epoch_end(state, net)
    callback.on_train_end(state, net)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == module.__name__]


def quiet() -> Progress:
    callback = Progress()
    callback._console = Console(file=io.StringIO(), force_terminal=False)
    return callback


def test_line_has_epoch_loss_metrics_and_speed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train(quiet(), trainer(3), 3, clock)
    # 20 rows in 4 s
    assert lines(caplog)[1] == "epoch 2/3  loss 0.1235  val/accuracy 0.9876  val/f1 0.5  5 samples/s"
    assert len(lines(caplog)) == 3


@pytest.mark.parametrize("num_epochs", [1, 19, 20, 21, 40, 100, 999])
def test_number_of_lines_is_bounded(num_epochs: int, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train(quiet(), trainer(num_epochs), num_epochs, clock)
    epochs = [int(re.match(r"epoch (\d+)/", line)[1]) for line in lines(caplog)]  # type: ignore[index]
    assert epochs[0] == 1
    assert epochs[-1] == num_epochs
    assert len(epochs) == len(set(epochs)) <= MAX_LINES + 2
    assert len(epochs) >= min(num_epochs, MAX_LINES // 2)


def test_other_processes_are_silent_and_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train(quiet(), trainer(1, is_global_zero=False, strategy=strategy(2)), 1, clock)
        assert lines(caplog) == []
        train(quiet(), trainer(1, strategy=strategy(2)), 1, clock)
    assert "10 samples/s" in lines(caplog)[0]


def test_terminal_gets_a_bar_and_no_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    callback = Progress()
    screen = io.StringIO()
    callback._console = Console(file=screen, force_terminal=True, width=160)
    with caplog.at_level(logging.INFO):
        train(callback, trainer(2), 2, clock)
    assert callback._bar is None  # ended
    assert lines(caplog) == []
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "epoch 2/2" in shown
    assert "4/4" in shown
    assert "loss 0.1235" in shown
    assert "5 samples/s" in shown


@pytest.mark.parametrize("end", ["exception", "disable"])
def test_bar_ends_with_the_run(end: str, clock: Clock) -> None:
    callback = Progress()
    callback._console = Console(file=io.StringIO(), force_terminal=True)
    callback.on_train_start(trainer(2), Module())
    assert callback._bar is not None
    if end == "exception":
        callback.on_exception(trainer(2), Module(), RuntimeError())
    else:
        callback.disable()
    assert callback._bar is None


class Counting(LightningModule):
    def count_steps(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("max_epochs", "net", "total"),
    [(3, Module(), 6), (None, Module(), None), (3, Counting(), 7)],  # 3 epochs of 2 steps; a task counts by itself
)
def test_total_of_the_bar(max_epochs: int | None, net: LightningModule, total: int | None) -> None:
    assert module._total_steps(trainer(max_epochs), net) == total


@pytest.mark.parametrize(
    "batch",
    [BATCH, [BATCH["x"], None], (BATCH["x"],), BATCH["x"], [{"x": torch.zeros(4, 2)}, {"x": torch.zeros(6, 2)}]],
)
def test_rows_of_any_kind_of_batch(batch: Any) -> None:
    assert module._num_samples(batch) == 10


def test_module_without_numbers(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    callback = quiet()
    assert callback._numbers(LightningModule(), 12345.6) == "12,346 samples/s"
