"""The settings of the optimisation step, as a user meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


def test_num_07_float16_on_a_cpu_is_refused_before_training(train: Callable) -> None:
    result = train("experiment=vision", "hardware=cpu", "engine.precision=16-mixed")
    assert result.exit_code == 1
    assert "`engine.precision` 16-mixed does not work on cpu" in result.output
    assert "Allowed here: 32-true, bf16-mixed, bf16-true, 64-true. Use engine.precision=bf16-mixed." in result.output
    assert not (result.folder / "checkpoints").exists()


def test_unknown_format_is_refused_with_the_allowed_ones(train: Callable) -> None:
    result = train("experiment=vision", "engine.precision=16-true")
    assert result.exit_code == 1
    assert "`engine.precision` must be '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '64-true'" in result.output
