"""Runs that run out of memory end as those with more memory, in one process and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = ("experiment=regression", "data.batch_size=64", "trainer.max_epochs=2", "logger=null", "hardware.num_threads=1")
CONSTANT = ("schedule=constant", "schedule.warmup_frac=0.0")
TWO = ("hardware=ddp_cpu",)
INJECT = "engine.inject_out_of_memory_above=16"
# 255 cars: four steps an epoch
NUM_STEPS = 8


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return content


def assert_same_run(first: Path, second: Path, steps: int = NUM_STEPS) -> None:
    """Weights within 1e-6, and the same curves within what is printed of them."""
    a, b = read(first), read(second)
    assert a["global_step"] == b["global_step"] == steps
    for name, value in a["state_dict"].items():
        torch.testing.assert_close(b["state_dict"][name], value, rtol=0, atol=1e-6, msg=name)
    one, other = (json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in (first, second))
    assert other == pytest.approx(one, rel=1e-4)
    curves = [
        pl.read_csv(f / "history.csv", infer_schema_length=None)["train/loss"].drop_nulls() for f in (first, second)
    ]
    assert curves[1].to_list() == pytest.approx(curves[0].to_list(), rel=1e-5)


def train_apart(folder: Path, *arguments: str, **environment: str) -> str:
    """Runs train.py in processes of its own; its output, with the logs of the other processes."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments, f"hydra.run.dir={folder.name}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text(encoding="utf-8") for path in folder.glob("rank_*.log")]
    return "\n".join([done.stdout, done.stderr, *logs])


@pytest.mark.parametrize("steps_per_execution", ["auto", "1"])  # found by the steps before training, or in training
def test_one_process(train: Callable, steps_per_execution: str) -> None:
    arguments = (*RUN, "hardware=cpu", f"engine.steps_per_execution={steps_per_execution}")
    whole, cut = train(*arguments), train(*arguments, INJECT)
    assert cut.exit_code == 0, cut.output
    said = (
        "Out of memory: each step of 64 samples is now taken as 4 x 16 (engine.micro_batch_size=16 starts like this)."
    )
    assert cut.output.count("Out of memory") == cut.output.count(said) == 1
    assert "Out of memory" not in whole.output
    assert_same_run(whole.folder, cut.folder)
    assert cut.record["micro_batch_size"] == read(cut.folder)["micro_batch_size"] == 16
    assert whole.record["micro_batch_size"] is None
    given = train(*arguments, "engine.micro_batch_size=16")
    assert all(v.equal(read(cut.folder)["state_dict"][n]) for n, v in read(given.folder)["state_dict"].items())
    assert given.metrics == cut.metrics


def test_two_processes(train: Callable, workspace: Path) -> None:
    whole = train(*RUN, "hardware=cpu")
    output = train_apart(workspace / "two", *RUN, *TWO)
    assert "Out of memory" not in output
    assert_same_run(whole.folder, workspace / "two")
    output = train_apart(workspace / "cut", *RUN, *TWO, INJECT)
    said = "each step of 64 samples is now taken as 2 x 16 on each of 2 devices (engine.micro_batch_size=16 starts like"
    assert output.count("Out of memory") == output.count(said) == 1
    assert_same_run(whole.folder, workspace / "cut")


ONE_RANK = """
import os
import torch
from leyden.engine.out_of_memory import fail_in_backward
from leyden.regression.task import RegressionTask

where, is_second = os.environ["WHERE"], os.environ.get("LOCAL_RANK") == "1"
failures = []
step = torch.optim.AdamW.step


def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Failing(RegressionTask):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        is_train = torch.is_grad_enabled() and self.net.training
        if is_second and is_train and self.trainer.global_step >= 4 and len(outputs) > 16:
            if where == "forward":
                fail()
            if where == "backward":
                fail_in_backward(self, "CUDA out of memory. Tried to allocate 2.00 GiB.")
        if is_second and not is_train and where == "validation" and len(outputs) > 8:
            fail()
        return loss, outputs


def failing_step(self, closure=None):
    result = step(self, closure)
    failures.append(1)
    if len(failures) == 1:
        fail()
    return result


if is_second and where == "optimiser":
    torch.optim.AdamW.step = failing_step
"""


@pytest.mark.parametrize(("where", "num_cuts"), [("forward", 1), ("backward", 1), ("optimiser", 0), ("validation", 0)])
def test_one_of_two_processes(train: Callable, workspace: Path, where: str, num_cuts: int) -> None:
    (workspace / "one_rank.py").write_text(ONE_RANK, encoding="utf-8")
    whole = train(*RUN, "hardware=cpu")
    output = train_apart(workspace / where, *RUN, *TWO, "model._target_=one_rank.Failing", WHERE=where)
    assert output.count("is now taken as 2 x 16 on each of 2 devices") == num_cuts
    assert output.count("in the optimiser's first step: it is taken again") == (where == "optimiser")
    assert output.count("Out of memory: batches are now evaluated 8 samples at a time") == (where == "validation")
    assert_same_run(whole.folder, workspace / where)
    assert read(workspace / where)["micro_batch_size"] == (16 if num_cuts else None)


def test_resumed_run_takes_the_same_micro_batches(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on where memory would do by then, and does not begin with whole batches."""
    arguments = (*RUN, *CONSTANT, "hardware=cpu", "model.net.dropout=0.5", INJECT)
    straight = train(*arguments, "trainer.max_epochs=4")
    stopped = train(*arguments)
    monkeypatch.setattr("leyden.engine.out_of_memory.fail_in_backward", lambda task, message: None)
    resumed = train(f"resume={stopped.folder}", "trainer.max_epochs=4")
    assert resumed.exit_code == 0, resumed.output
    first, second = read(straight.folder), read(stopped.folder)
    assert first["micro_batch_size"] == second["micro_batch_size"] == 16
    assert all(value.equal(second["state_dict"][name]) for name, value in first["state_dict"].items())
    assert (straight.folder / "history.csv").read_text() == (stopped.folder / "history.csv").read_text()


def test_next_run_says_that_it_starts_smaller(train: Callable, workspace: Path) -> None:
    arguments = (*RUN, "hardware=cpu", INJECT)
    first, second = train(*arguments), train(*arguments)
    assert "Micro-batches of 16 samples, since an earlier run needed them on this device" in second.output
    assert "Out of memory" not in second.output
    assert second.metrics == first.metrics
    assert len(list((workspace / "outputs" / "regression" / ".micro_batch_sizes").iterdir())) == 1
    third = train(*arguments, "engine.remember_micro_batch_size=false")
    assert "Out of memory" in third.output
    assert third.metrics == first.metrics


def test_one_sample_that_does_not_fit_is_one_message(train: Callable) -> None:
    result = train(*RUN, "hardware=cpu", "engine.inject_out_of_memory_above=0")
    assert result.exit_code == 1
    assert "A training step on one sample at a time does not fit into memory" in result.output
    assert "Traceback" not in result.output
    assert result.record["state"] == "failed"
