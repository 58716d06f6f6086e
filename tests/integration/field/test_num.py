"""Numbers: losses that are not finite, schedules over optimiser steps, the norm that is logged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from field_data import SMALL

ROOT = Path(__file__).parents[3]

# ---- NUM-01: a loss that is not finite ends the run --------------------------------------------------------------


def test_num_01_diverging_run_stops_at_the_step_and_keeps_a_good_checkpoint(train: Callable, workspace: Path) -> None:
    result = train("experiment=regression", *SMALL, "optim.lr=1e30", "trainer.max_epochs=5")
    assert result.exit_code == 1
    assert "`train/loss_step` is" in result.output
    assert "so training stopped." in result.output
    assert "The last finite training loss was" in result.output
    record = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
    assert record["state"] == "failed"
    for path in (result.folder / "checkpoints").glob("*.ckpt"):
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert all(t.isfinite().all() for t in weights.values() if t.is_floating_point()), path


# ---- NUM-03: the schedule is laid out over the optimiser steps ---------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "num_steps"),
    [
        # 1,197 training pictures in batches of 120 are ten batches, an epoch of four steps of three batches
        (("engine.accumulate_batches=3", "trainer.max_epochs=4"), 16),
        (("engine.accumulate_batches=3", "trainer.max_epochs=4", "trainer.max_steps=7"), 7),
        (("trainer.limit_train_batches=0.5", "trainer.max_epochs=4"), 20),
        (("trainer.limit_train_batches=0.5", "engine.accumulate_batches=3", "trainer.max_epochs=4"), 8),
    ],
)
def test_num_03_peak_and_final_rate_are_reached(
    train: Callable, workspace: Path, arguments: tuple[str, ...], num_steps: int
) -> None:
    given = (
        "schedule=one_cycle",
        "schedule.warmup_frac=0.3",
        "schedule.final_frac=0.01",
        "optim.lr=0.004",
        "trainer.log_every_n_steps=1",
    )
    result = train(
        "experiment=vision", *SMALL, "data.batch_size=120", "trainer.log_every_n_steps=1", *given, *arguments
    )
    assert result.exit_code == 0, result.output
    rates = pl.read_csv(result.folder / "history.csv", infer_schema_length=None).select("step", "train/lr").drop_nulls()
    assert rates["step"].to_list() == list(range(1, num_steps + 1))
    assert rates["train/lr"].max() == pytest.approx(0.004, abs=1e-9)
    assert rates["train/lr"][-1] == pytest.approx(0.004 * 0.01, abs=1e-9)
    assert torch.load(result.folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == num_steps


def test_num_03_two_processes(workspace: Path) -> None:
    """1,197 pictures in global batches of 120: ten steps an epoch, however many processes share each."""
    arguments = ("experiment=vision", "data.batch_size=120", "trainer.max_epochs=2", "trainer.log_every_n_steps=1")
    rate = ("schedule=one_cycle", "schedule.warmup_frac=0.3", "schedule.final_frac=0.01", "optim.lr=0.004")
    two = ("hardware=ddp", "hardware.accelerator=cpu", "hardware.devices=2", "hardware.num_threads=1", "logger=null")
    command = [sys.executable, str(ROOT / "train.py"), *arguments, *rate, *two]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (history,) = workspace.rglob("history.csv")
    rates = pl.read_csv(history, infer_schema_length=None).select("step", "train/lr").drop_nulls()
    assert rates["step"].to_list() == list(range(1, 21))
    assert rates["train/lr"].max() == pytest.approx(0.004, abs=1e-9)
    assert rates["train/lr"][-1] == pytest.approx(0.004 * 0.01, abs=1e-9)


# ---- NUM-05: one clipping a step, and the norm before it ---------------------------------------------------------


def test_num_05_accumulated_and_whole_batches_clip_alike(train: Callable, workspace: Path) -> None:
    clipping = ("engine.gradient_clip_norm=0.1", "optim=sgd", "trainer.log_every_n_steps=1", "trainer.max_steps=3")
    whole = train("experiment=regression", *SMALL, *clipping, "data.batch_size=64")
    parts = train("experiment=regression", *SMALL, *clipping, "data.batch_size=16", "engine.accumulate_batches=4")
    assert parts.exit_code == 0, parts.output
    first, second = (
        torch.load(r.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for r in (whole, parts)
    )
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-6)
    norms = [
        pl.read_csv(r.folder / "history.csv", infer_schema_length=None)["train/grad_norm"].drop_nulls().to_list()
        for r in (whole, parts)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert min(norms[0]) > 0.1  # the norm before clipping


# ---- NUM-07: float16 needs a GPU ---------------------------------------------------------------------------------


def test_num_07_float16_on_a_cpu_is_refused_before_training(train: Callable) -> None:
    result = train("experiment=vision", "hardware=cpu", "engine.precision=16-mixed")
    assert result.exit_code == 1
    assert "`engine.precision` 16-mixed does not work on cpu" in result.output
    assert "Allowed here: 32-true, bf16-mixed, bf16-true, 64-true. Use engine.precision=bf16-mixed." in result.output
    assert not result.folders
