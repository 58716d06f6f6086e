"""Every file of conf/experiment runs end to end, small."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
# Their files must be downloaded; tests/integration/test_image_sets.py runs them on small files of the same format.
DOWNLOADED = {name for name in EXPERIMENTS if "mnist" in name or "cifar" in name}


@pytest.mark.parametrize("experiment", sorted(set(EXPERIMENTS) - DOWNLOADED))
def test_experiment_runs_small(train: Callable, experiment: str) -> None:
    result = train(f"experiment={experiment}", "debug=fast")
    assert result.exit_code == 0, result.output
    metrics = result.metrics
    assert {name.split("/")[0] for name in metrics} >= {"test", "train", "objective"}
    assert all(math.isfinite(value) for value in metrics.values())
    assert result.record["state"] == "finished"
    for name in ("history.csv", "train.log", "checkpoints/best.ckpt", "checkpoints/last.ckpt", ".hydra/config.yaml"):
        assert (result.folder / name).is_file(), name
    assert len(list((result.folder / "tensorboard").glob("events.*"))) == 1
