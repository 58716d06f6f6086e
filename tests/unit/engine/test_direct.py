"""When the trainer's wrappers of a step are left out, and that nothing but time depends on it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from leyden.engine.direct import may_call_directly


class Listens(Callback):
    """To one of the hooks that would not be called."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Steps(LightningModule):
    """A task with an optimiser step of its own."""

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        pass


def trainer(**changes: Any) -> Any:
    parts = {
        "callbacks": [ModelSummary()],
        "strategy": SingleDeviceStrategy(torch.device("cpu")),
        "precision_plugin": Precision(),
        "profiler": PassThroughProfiler(),
    }
    return SimpleNamespace(**{**parts, **changes})


def test_plain_case_is_direct() -> None:
    assert may_call_directly(LightningModule(), trainer())
    assert may_call_directly(LightningModule(), trainer(precision_plugin=DoublePrecision()))
    assert may_call_directly(LightningModule(), trainer(precision_plugin=MixedPrecision("bf16-mixed", "cpu")))


@pytest.mark.parametrize(
    "changes",
    [
        {"callbacks": [Listens()]},
        {"strategy": DDPStrategy()},
        {"precision_plugin": SimpleNamespace(scaler=None)},
        {"precision_plugin": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))},  # type: ignore[attr-defined]
        {"profiler": SimpleProfiler()},
    ],
    ids=["callback", "processes", "unknown precision", "scaler", "profiler"],
)
def test_whoever_listens_is_heard(changes: dict[str, Any]) -> None:
    assert not may_call_directly(LightningModule(), trainer(**changes))


def test_task_with_its_own_step_and_anomaly_detection() -> None:
    assert not may_call_directly(Steps(), trainer())
    with torch.autograd.set_detect_anomaly(True):
        assert not may_call_directly(LightningModule(), trainer())


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_weights_are_those_of_the_trainers_own_calls(
    train: Callable, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    arguments = ("experiment=regression", f"optim={optim}", "trainer.max_epochs=3", "logger=null", "test=false")
    direct = train(*arguments)
    monkeypatch.setattr("leyden.engine.direct.may_call_directly", lambda *_: False)
    wrapped = train(*arguments)
    assert (direct.exit_code, wrapped.exit_code) == (0, 0), direct.output + wrapped.output
    states = [torch.load(r.folder / "checkpoints" / "last.ckpt", weights_only=True) for r in (direct, wrapped)]
    assert states[0]["global_step"] == states[1]["global_step"] > 0
    for name, weight in states[0]["state_dict"].items():
        assert torch.equal(weight, states[1]["state_dict"][name]), name
