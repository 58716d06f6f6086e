"""The settings of the optimisation step, as a user meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.runs.evaluate import evaluate_run

SHORT = ("trainer.max_epochs=2", "logger=null", "hardware=cpu", "hardware.num_threads=1")

# ---- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_learns_nearly_what_float32_does(train: Callable, precision: str) -> None:
    exact = train("experiment=vision", *SHORT)
    rounded = train("experiment=vision", *SHORT, f"engine.precision={precision}")
    assert rounded.exit_code == 0, rounded.output
    assert rounded.metrics["test/loss"] == pytest.approx(exact.metrics["test/loss"], rel=0.05)
    assert rounded.metrics["test/loss"] != exact.metrics["test/loss"]
    # Evaluation computes in the run's own format
    assert evaluate_run(rounded.folder)["test/loss"] == pytest.approx(rounded.metrics["test/loss"], rel=1e-6)


@pytest.mark.parametrize(("given", "meant"), [("32", "32-true"), ("64", "64-true"), ("bf16", "bf16-true")])
def test_short_names_of_formats(train: Callable, given: str, meant: str) -> None:
    short, long = (train("experiment=regression", *SHORT, f"engine.precision={name}") for name in (given, meant))
    assert short.exit_code == 0, short.output
    assert short.metrics == long.metrics
    if meant == "64-true":
        assert evaluate_run(short.folder)["test/loss"] == pytest.approx(short.metrics["test/loss"], rel=1e-6)


def test_unknown_format_is_refused_with_the_allowed_ones(train: Callable) -> None:
    result = train("experiment=vision", "engine.precision=16-true")
    assert result.exit_code == 1
    assert "`engine.precision` must be '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '64-true'" in result.output


# ---- average of the weights ----------------------------------------------------------------------------------

CONSTANT = ("schedule=constant", "schedule.warmup_frac=0.0")
EMA = ("experiment=regression_diabetes", *SHORT, *CONSTANT, "engine.ema_decay=0.9")


def read(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_average_that_keeps_nothing_is_the_weights(train: Callable) -> None:
    plain, same = train(*EMA[:-1]), train(*EMA[:-1], "engine.ema_decay=0")
    assert same.metrics == plain.metrics


def test_without_a_checkpoint_the_average_is_tested(train: Callable) -> None:
    arguments = (*EMA, "trainer.max_epochs=2")
    kept = train(*arguments, "callbacks.checkpoint.monitor=null")
    none = train(*arguments, "callbacks.checkpoint=null")
    assert none.exit_code == 0, none.output
    assert none.metrics["test/loss"] == kept.metrics["test/loss"]


# ---- compiling -----------------------------------------------------------------------------------------------

COMPILED = ("experiment=regression_diabetes", *SHORT, *CONSTANT, "model.net.dropout=0.2")


def test_compiled_run_goes_on_bit_for_bit(train: Callable) -> None:
    arguments = (*COMPILED, "engine.compile=default", "engine.micro_batch_size=20")
    straight = train(*arguments, "trainer.max_epochs=3")
    stopped = train(*arguments, "trainer.max_steps=5")
    resumed = train(f"resume={stopped.folder}", "trainer.max_epochs=3", "trainer.max_steps=-1")
    assert resumed.exit_code == 0, resumed.output
    assert_equal(read(straight.folder)["state_dict"], read(stopped.folder)["state_dict"])


def test_network_that_cannot_be_compiled_is_refused_before_training(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("Python.h: no such file")

    torch._dynamo.reset()
    monkeypatch.setattr("leyden.engine.compile.compile_arguments", lambda mode: {"backend": fail})
    result = train(*COMPILED, "engine.compile=reduce-overhead")
    assert result.exit_code == 1
    assert "engine.compile=reduce-overhead is the same as default on cpu" in result.output
    assert "torch.compile fails on `model.net` (MLP): Python.h: no such file. Use engine.compile=off." in result.output
    assert not list((result.folder / "checkpoints").glob("*.ckpt"))


# ---- activation checkpointing --------------------------------------------------------------------------------


def test_recomputed_activations_change_nothing(train: Callable) -> None:
    arguments = ("experiment=vision", *SHORT, "trainer.max_steps=8", "engine.micro_batch_size=40")
    plain, less = train(*arguments), train(*arguments, "engine.activation_checkpointing=true")
    assert less.exit_code == 0, less.output
    assert less.metrics == plain.metrics
    assert_equal(read(less.folder)["state_dict"], read(plain.folder)["state_dict"])


def test_network_without_blocks_is_refused(train: Callable) -> None:
    result = train("experiment=regression", *SHORT, "engine.activation_checkpointing=true")
    assert result.exit_code == 1
    assert "`model.net` (leyden.regression.nets.MLP) does not say which of its modules are repeated" in result.output


# ---- one result, however a step is cut ------------------------------------------------------------------------

# SGD: Adam divides by the size of the gradient, which blows the rounding of small ones up. ViT: where rounding moves
# a ReLU over its kink, the gradient is another. Dropout is drawn per micro-batch.
STEPS = (*SHORT, *CONSTANT, "optim=sgd", "optim.lr=0.02", "model.net.dropout=0", "data.batch_size=128")


@pytest.mark.parametrize(
    ("experiment", "cut"),
    [
        ("vision_vit", "engine.micro_batch_size=128"),
        ("vision_vit", "engine.micro_batch_size=32"),
        ("vision_vit", "engine.micro_batch_size=24"),
        ("regression", "engine.micro_batch_size=24"),
        ("regression", "data.batch_size=32 engine.accumulate_batches=4"),
        ("regression", "data.batch_size=32 engine.accumulate_batches=4 engine.micro_batch_size=24"),
    ],
)
def test_weights_do_not_depend_on_how_a_step_is_cut(train: Callable, experiment: str, cut: str) -> None:
    arguments = (f"experiment={experiment}", *STEPS)
    whole, parts = train(*arguments), train(*arguments, *cut.split())
    assert parts.exit_code == 0, parts.output
    first, second = read(whole.folder), read(parts.folder)
    # two epochs of 1,197 pictures, or of 255 cars
    steps = 2 * 10 if experiment == "vision_vit" else 2 * 2
    assert first["global_step"] == second["global_step"] == steps
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], value, rtol=0, atol=1e-6)


# ---- threads -------------------------------------------------------------------------------------------------


@pytest.fixture
def _granted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr("leyden.hardware.threads._given", lambda: (2, None))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_granted")
def test_resumed_run_takes_the_threads_it_chose(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though measuring would say something else by then."""
    few = ("trainer.limit_train_batches=6", "hardware.num_threads=auto")
    arguments = ("experiment=vision", *SHORT, *CONSTANT, *few)
    times = {1: 3e-3, 2: 1e-3}
    monkeypatch.setattr("leyden.engine.threads.measure", lambda task, data, trainer, number: times[number])
    straight = train(*arguments, "trainer.max_epochs=3")
    assert "CPU threads of an operator: 2 (3.00 ms a step with 1, 1.00 ms a step with 2)." in straight.output
    stopped = train(*arguments)
    assert stopped.record["num_threads"] == read(stopped.folder)["leyden"]["num_threads"] == 2
    times[1] = 1e-4
    resumed = train(f"resume={stopped.folder}", "trainer.max_epochs=3")
    assert resumed.exit_code == 0, resumed.output
    assert "CPU threads of an operator: 2 (as before the run stopped)." in resumed.output
    assert_equal(read(straight.folder)["state_dict"], read(stopped.folder)["state_dict"])
    other = train(*arguments)
    assert other.record["num_threads"] == read(other.folder)["leyden"]["num_threads"] == 1
