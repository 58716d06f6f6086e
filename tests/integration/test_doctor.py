"""`leyden doctor` on the machine that runs the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from leyden.hardware import measure


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measure, "MATMUL_SIZE", dict.fromkeys(measure.MATMUL_SIZE, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", dict.fromkeys(measure.COPY_BYTES, 2**16))
    monkeypatch.setattr(measure, "MEASURE_S", 0.02)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_json(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["survey"]["machine"]["num_cores"] >= 1
    assert found["survey"]["torch"] == torch.__version__
    assert found["speeds"][0]["device"] == "cpu"
    assert found["experiment"] == "vision"
    assert found["steps"][0]["batch_size"] == 64
    assert found["steps"][0]["transfer_ms"] is None
    assert found["steps"][0]["step_ms"] > 0
    if not torch.cuda.is_available():
        assert found["survey"]["driver"] is None
        assert "were not measured" in found["not_measured"][0]
    assert "Measuring a step on the CPU" in result.stderr
    assert "tf32" not in result.stderr or torch.cuda.is_available()
    assert not list(workspace.iterdir())  # it leaves nothing


def test_tables(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("doctor")
    assert result.exit_code == 0, result.output
    for word in ("Machine", "hardware=auto", "Speed", "TFLOP/s", "GB/s", "A step of experiment=vision, 64 samples"):
        assert word in result.stdout


def test_help_has_an_example(leyden: Callable[..., Result], workspace: Path) -> None:
    assert "leyden doctor --json > machine.json" in leyden("doctor", "--help").output
