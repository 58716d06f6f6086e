"""scripts/bench.py from the command to the JSON, on a few batches; no time is judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.experiment import build_parts
from benchmarks.floor import record_products
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


def test_the_loop_by_hand_and_leyden(workspace: Path) -> None:
    few = ("--repeats", "1", "--epochs", "2", "--limit-batches", "3")
    done = bench(workspace, "nlp", *few, "--contenders", "raw,leyden", "--results-dir", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Leyden is at most 1.10 times the loop by hand" in done.stdout
    results = Results.model_validate_json((workspace / "results" / "nlp.json").read_text(encoding="utf-8"))
    assert [m.contender for m in results.measurements] == ["raw", "leyden"]
    for measurement in results.measurements:
        assert measurement.num_batches == 3
        assert len(measurement.epochs) == 2  # the one of warm-up does not count
        assert all(epoch.cpu_s > 0 and epoch.wall_s > 0 for epoch in measurement.epochs)
    validated = [m.epochs[0].validation_cpu_s > 0 for m in results.measurements]
    assert validated == [False, True]


def test_unknown_names_are_refused(workspace: Path) -> None:
    done = bench(workspace, "chess")
    assert done.returncode == 2
    assert "mlp, cnn, nlp, startup" in done.stderr
    done = bench(workspace, "nlp", "--contenders", "raw,jax")
    assert done.returncode == 2
    assert "jax" in done.stderr


def test_products_are_those_of_the_network() -> None:
    import torch

    parts = build_parts(["experiment=vision", "hardware=cpu"])
    x, label = parts.cut(torch.arange(4))
    assert x.shape == (4, 1, 8, 8)
    assert label.shape == (4,)
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    shapes = [tuple(call().shape) for call in record_products(linear, x)]  # type: ignore[attr-defined]
    # forward and gradient of the weight; the gradient of the input only in the second layer
    assert shapes == [(4, 5), (5, 64), (4, 2), (2, 5), (4, 5)]
    conv = torch.nn.Conv2d(1, 3, 3)
    (forward, backward) = [call() for call in record_products(conv, x)]
    assert tuple(forward.shape) == (4, 3, 6, 6)  # type: ignore[attr-defined]
    assert backward[0] is None  # type: ignore[index]
    assert tuple(backward[1].shape) == (3, 1, 3, 3)  # type: ignore[index]
