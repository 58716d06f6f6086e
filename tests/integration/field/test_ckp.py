"""Checkpoints: they load anywhere, resume exactly, are whole or not there, and say what they cannot do."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from field_data import SMALL, TABLE, TEXTS, table_rows, text_rows, write_csv, write_table
from typer.testing import Result

from leyden.engine.checkpoint import read_checkpoint
from leyden.runs.evaluate import evaluate_run
from leyden.runs.restore import load_checkpoint

ROOT = Path(__file__).parents[3]
CONSTANT = ("schedule=constant", "schedule.warmup_frac=0.0")
PLAIN = ("experiment=regression", "hardware.num_threads=1", "logger=null", *CONSTANT)


def history(folder: Path, column: str) -> list[float]:
    return pl.read_csv(folder / "history.csv", infer_schema_length=None)[column].drop_nulls().to_list()


# ---- CKP-01: own checkpoints load without a flag -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regression", "vision", "nlp"])
def test_ckp_01_resume_evaluate_and_plain_load(train: Callable, leyden: Callable[..., Result], kind: str) -> None:
    write_csv("texts.csv", ("text", "label"), text_rows(60))
    arguments = {"regression": ("experiment=regression",), "vision": ("experiment=vision",), "nlp": TEXTS}[kind]
    run = train(*arguments, *SMALL, *CONSTANT, "trainer.limit_train_batches=3")
    assert run.exit_code == 0, run.output
    again = train(f"resume={run.folder}", "trainer.max_epochs=2")
    assert again.exit_code == 0, again.output
    evaluated = leyden("evaluate", run.folder)
    assert evaluated.exit_code == 0, evaluated.output
    for name in ("best.ckpt", "last.ckpt"):
        torch.load(run.folder / "checkpoints" / name, weights_only=True)


# ---- CKP-02: the middle of an epoch ------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["val/loss", "train/loss"])
@pytest.mark.parametrize("steps_per_call", ["1", "8"])
def test_ckp_02_each_sample_once_over_stop_and_resume(train: Callable, metric: str, steps_per_call: str) -> None:
    from leyden.callbacks.trace import read_trace

    write_table("table.csv", 24)
    trace = "+callbacks.trace._target_=leyden.callbacks.trace.Trace"
    sizes = (
        "data.batch_size=2",
        "data.val_frac=0.2",
        "data.test_frac=0.1",
        f"engine.steps_per_execution={steps_per_call}",
    )
    arguments = ("experiment=regression", *SMALL, *TABLE, *sizes, f"objective.metric={metric}", trace)
    stopped = train(*arguments, "trainer.max_steps=3")
    again = train(f"resume={stopped.folder}", "trainer.max_steps=12", "trainer.max_epochs=2")
    assert again.exit_code == 0, again.output
    resumed = train(f"resume={stopped.folder}", "trainer.max_steps=-1", "trainer.max_epochs=2")
    assert resumed.exit_code == 0, resumed.output
    rows = read_trace(stopped.folder / "trace.jsonl")
    straight = train(*arguments, "trainer.max_epochs=2")
    assert rows == read_trace(straight.folder / "trace.jsonl")
    assert [row["step"] for row in rows] == list(range(2 * 9))
    for epoch in range(2):
        assert sorted(s for row in rows if row["epoch"] == epoch for s in row["samples"]) == list(range(17))


# ---- CKP-04: a run that is at its end ----------------------------------------------------------------------------


def test_ckp_04_finished_run_says_how_to_go_on(train: Callable) -> None:
    run = train(*PLAIN, "trainer.max_epochs=2")
    again = train(f"resume={run.folder}", "objective.metric=val/loss")
    assert again.exit_code == 1
    assert "it is at epoch 2 of 2 (step 16). Raise trainer.max_epochs to go on." in again.output


# ---- CKP-05: a wrong path ----------------------------------------------------------------------------------------


def test_ckp_05_wrong_path_is_said_before_data_are_read(train: Callable, leyden: Callable[..., Result]) -> None:
    run = train(*PLAIN, "trainer.max_epochs=1").folder
    missing = train("resume=logs/nope")
    assert missing.exit_code == 1
    assert f"`resume` names {Path('logs/nope').absolute()}, which is not a run folder" in missing.output
    assert f"Runs below outputs: {run.relative_to(Path.cwd())}" in missing.output
    assert "Data:" not in missing.output
    folder = leyden("evaluate", run.parent)
    assert folder.exit_code == 1
    assert f"no run folder or checkpoint at {run.parent}" in folder.output
    assert "best.ckpt" in folder.output


# ---- CKP-07: nothing can be written ------------------------------------------------------------------------------


def without_power_over_permissions() -> None:
    """Lets permissions count for a superuser too: the next program may not override them (PR_CAPBSET_DROP)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if os.geteuid() == 0 and libc.prctl(24, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def run_train(*arguments: str, before: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=before, timeout=120, check=False)


def test_ckp_07_read_only_outputs(workspace: Path) -> None:
    Path("outputs").mkdir(mode=0o555)
    done = run_train(*PLAIN, before=without_power_over_permissions)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert "choose another place with paths.outputs=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_ckp_07_read_only_checkpoint_folder(workspace: Path) -> None:
    folder = Path("out/checkpoints")
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    done = run_train(*PLAIN, "hydra.run.dir=out", before=without_power_over_permissions)
    assert done.returncode == 1
    assert f"Checkpoints cannot be written to {folder.absolute()}: Permission denied" in done.stdout
    assert "epoch 1/" not in done.stdout  # before any work was lost
    assert not list(folder.iterdir())


def test_ckp_07_full_disk_ends_the_run_and_keeps_the_last_good_state(train: Callable, workspace: Path) -> None:
    run = train(*PLAIN, "trainer.max_epochs=1").folder
    last = run / "checkpoints" / "last.ckpt"
    size = last.stat().st_size

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))  # what a full disk does, for one process

    full = run_train(f"resume={run}", "trainer.max_epochs=9", before=small_files)
    assert full.returncode == 1
    assert "could not be written: File too large" in full.stdout
    assert f"The last good checkpoint is {last}" in full.stdout
    assert "Traceback" not in full.stdout + full.stderr
    assert read_checkpoint(last)["global_step"] == 8
    assert not list((run / "checkpoints").glob(".*"))
    resumed = train(f"resume={run}", "trainer.max_epochs=2")
    assert resumed.exit_code == 0, resumed.output


# ---- CKP-09: no checkpoint is asked for --------------------------------------------------------------------------


def test_ckp_09_without_checkpoints_the_final_weights_are_tested(train: Callable) -> None:
    run = train(*PLAIN, "trainer.max_epochs=1", "callbacks.checkpoint=null")
    assert run.exit_code == 0, run.output
    assert "the final weights are tested" in run.output
    assert "test/r2" in run.metrics


# ---- CKP-11: the best so far, and patience -----------------------------------------------------------------------


def test_ckp_11_best_value_and_patience_go_on(train: Callable) -> None:
    # At this rate the first epoch is better than the three after it
    arguments = (*PLAIN, "optim.lr=0.1", "callbacks=early_stopping", "callbacks.early_stopping.patience=3")
    straight = train(*arguments, "trainer.max_epochs=8")
    folder = train(*arguments, "trainer.max_epochs=2").folder
    before = (folder / "checkpoints" / "best.ckpt").read_bytes()
    resumed = train(f"resume={folder}", "trainer.max_epochs=8")
    assert resumed.exit_code == 0, resumed.output
    assert "Stopped early after epoch 4" in resumed.output
    losses = history(straight.folder, "val/loss")
    assert len(losses) == 4
    assert losses.index(min(losses)) == 0
    assert history(folder, "val/loss") == losses
    assert (folder / "checkpoints" / "best.ckpt").read_bytes() == before
    first, second = (read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (straight.folder, folder))
    assert first["callbacks"] == second["callbacks"]


# ---- CKP-13: another learning rate on resume ---------------------------------------------------------------------


def test_ckp_13_another_rate_is_refused_or_taken_but_never_ignored(train: Callable) -> None:
    run = train(*PLAIN, "trainer.max_epochs=1", "optim.lr=0.01")
    refused = train(f"resume={run.folder}", "trainer.max_epochs=2", "optim.lr=0.5")
    assert refused.exit_code == 1
    assert "optim.lr (0.01 -> 0.5)" in refused.output
    forced = train(f"resume={run.folder}", "trainer.max_epochs=2", "optim.lr=0.5", "resume_force=true")
    assert forced.exit_code == 0, forced.output
    rates = history(run.folder, "train/lr")
    assert rates == [0.01, 0.5]
    group = read_checkpoint(run.folder / "checkpoints" / "last.ckpt")["optimizer_states"][0]["param_groups"][0]
    assert group["lr"] == 0.5


# ---- CKP-14: compiled and not ------------------------------------------------------------------------------------

FEW = ("experiment=regression_diabetes", *SMALL, *CONSTANT, "trainer.max_epochs=2")
COMPILED = (*FEW, "model.net.dropout=0.2")


def read(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_ckp_14_compiled_and_not_load_each_other(train: Callable) -> None:
    plain, compiled = train(*COMPILED), train(*COMPILED, "engine.compile=default")
    assert compiled.exit_code == 0, compiled.output
    assert re.search(
        r"Compiling the training step took \d+\.\d s \(engine\.compile=default\); loss and", compiled.output
    )
    assert compiled.metrics == pytest.approx(plain.metrics, rel=1e-4)
    assert read(compiled.folder)["state_dict"].keys() == read(plain.folder)["state_dict"].keys()
    assert evaluate_run(compiled.folder)["test/loss"] == pytest.approx(compiled.metrics["test/loss"], rel=1e-5)
    for run, other in ((plain, "default"), (compiled, "off")):
        refused = train(f"resume={run.folder}", "trainer.max_epochs=4", f"engine.compile={other}")
        assert "engine.compile (" in refused.output
        resumed = train(f"resume={run.folder}", "trainer.max_epochs=4", f"engine.compile={other}", "resume_force=true")
        assert resumed.exit_code == 0, resumed.output
    first, second = (json.loads((run.folder / "metrics.json").read_text(encoding="utf-8")) for run in (plain, compiled))
    assert first == pytest.approx(second, rel=1e-4)


# ---- CKP-15: an average of the weights that starts late ----------------------------------------------------------

EMA = (*FEW, "engine.ema_decay=0.9")


@pytest.mark.parametrize("start", [0, 9])
def test_ckp_15_average_goes_on_after_a_stop(train: Callable, start: int) -> None:
    arguments = (*EMA, f"engine.ema_start_step={start}")
    straight = train(*arguments, "trainer.max_epochs=4")
    stopped = train(*arguments)
    resumed = train(f"resume={stopped.folder}", "trainer.max_epochs=4")
    assert resumed.exit_code == 0, resumed.output
    for name in ("last", "best"):
        one, two = read(straight.folder, name), read(stopped.folder, name)
        assert one["ema"]["weights"] == two["ema"]["weights"] == "ema"
        assert_equal(one["state_dict"], two["state_dict"])
        assert_equal(one["ema"]["raw"], two["ema"]["raw"])
    last = read(straight.folder)
    assert not last["state_dict"]["net.head.bias"].equal(last["ema"]["raw"]["net.head.bias"])
    assert straight.metrics == json.loads((stopped.folder / "metrics.json").read_text(encoding="utf-8"))


def test_ckp_15_average_is_what_is_tested_evaluated_and_predicted_with(train: Callable) -> None:
    result = train(*EMA)
    assert result.exit_code == 0, result.output
    checkpoint = load_checkpoint(result.folder)
    assert checkpoint.weights == "ema"
    evaluated = evaluate_run(result.folder)
    assert evaluated["test/loss"] == pytest.approx(result.metrics["test/loss"], rel=1e-6)
    assert evaluate_run(result.folder, "val")["val/loss"] == pytest.approx(result.metrics["val/loss"], rel=1e-6)
    assert result.metrics["test/loss"] != train(*EMA[:-1]).metrics["test/loss"]


def test_ckp_15_run_that_ends_before_the_start_is_the_run_without(train: Callable) -> None:
    plain, early = train(*EMA[:-1]), train(*EMA, "engine.ema_start_step=1000")
    assert early.exit_code == 0, early.output
    assert early.metrics == plain.metrics
    assert read(early.folder)["ema"] == {"weights": "raw"}
    assert_equal(read(early.folder)["state_dict"], read(plain.folder)["state_dict"])


# ---- CKP-16: rates over a stop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one_cycle"])
def test_ckp_16_rates_of_a_stopped_and_resumed_run(train: Callable, schedule: str) -> None:
    arguments = ("experiment=regression", "hardware.num_threads=1", "logger=null", f"schedule={schedule}")
    arguments = (*arguments, "schedule.warmup_frac=0.25", "trainer.log_every_n_steps=1", "trainer.max_epochs=4")
    straight = train(*arguments)
    Path("stop.py").write_text(
        "import os, signal\nfrom lightning.pytorch import Callback\n\n\nclass Stop(Callback):\n"
        "    def on_train_epoch_end(self, trainer, module):\n        if trainer.current_epoch == 1:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    stopped = train(*arguments, "+callbacks.stop._target_=stop.Stop")
    assert stopped.exit_code == 143
    resumed = train(f"resume={stopped.folder}")
    assert resumed.exit_code == 0, resumed.output
    rates = history(straight.folder, "train/lr")
    assert len(rates) == 32
    assert history(stopped.folder, "train/lr") == rates


def test_table_rows_are_as_described() -> None:
    assert all(abs(3 * a - 2 * b + 1 - y) < 1e-5 for a, b, y in table_rows(5))
