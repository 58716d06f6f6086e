"""`leyden prove resume`: a real run is killed by SIGKILL and goes on; what is not exact is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

SHORT = ("data=diabetes", "data.batch_size=64", "trainer.max_epochs=2", "hardware.num_threads=1", "logger=null")


def test_killed_and_resumed_run_is_exact(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden(
        "prove", "resume", "experiment=regression", *SHORT, "--kills", "2", "--seed", "1", "--folder", "proof"
    )
    assert result.exit_code == 0, result.output
    assert "NO" not in result.output
    assert "largest weight difference" in result.output
    assert {path.parent.name for path in Path("proof").iterdir()} == {"proof"}
    assert len(list(Path("proof").rglob("last.ckpt"))) == 2


def test_run_with_too_few_steps_is_an_error(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("prove", "resume", "experiment=regression", *SHORT, "trainer.max_steps=2", "--kills", "5")
    assert result.exit_code == 1
    assert "takes 2 steps, too few for 5 kills" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "RefusedError: `trainer.max_epochs` must be greater than or equal to 1, got 0."),
        (("experiment=nothing",), "RefusedError: there is no experiment 'nothing'. Available: "),
    ],
)
def test_what_cannot_run_is_said(
    leyden: Callable[..., Result], workspace: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = leyden("prove", "resume", *arguments, "trainer.max_epochs=0")
    assert result.exit_code == 1
    assert message in result.output


def test_devices_proof_of_two_processes(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("prove", "devices", "experiment=regression_diabetes", "--devices", "2", "--steps", "6")
    assert result.exit_code == 0, result.output
    assert re.search(r"ddp_cpu 2 .*equal +equal .*yes", result.output)


def test_devices_proof_tells_what_differs(
    leyden: Callable[..., Result], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.runs.prove_devices.TOLERANCE", 0.0)  # float32 sums differ in their last digits
    experiment = ("experiment=regression_diabetes", "engine.precision=32")
    result = leyden("prove", "devices", *experiment, "--devices", "2", "--steps", "6")
    assert result.exit_code == 1, result.output
    assert "NO" in result.output
