"""Runs of several processes: one folder, every sample once, one split, and nobody left. Their launcher and lost
processes have tests of their own in tests/integration/test_processes.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from field_data import TABLE, write_table

from leyden.callbacks.trace import read_trace

ROOT = Path(__file__).parents[3]
TRAIN = [sys.executable, str(ROOT / "train.py")]
TWO = ("hardware=ddp_cpu", "logger=null")
ONE = ("hardware=cpu", "hardware.num_threads=1", "logger=null")

SPY = """
import json, os
from lightning.pytorch import Callback

class Spy(Callback):
    def on_test_start(self, trainer, module):
        self.count = 0

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.count += len(batch["target"])

    def on_test_end(self, trainer, module):
        data = trainer.datamodule.fingerprint()
        with open(f"{trainer.default_root_dir}/spy_{trainer.global_rank}.json", "w") as file:
            json.dump({"count": self.count, "data": data}, file)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*TRAIN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- DDP-01, DDP-02: one folder for a run, one for a sweep -------------------------------------------------------


def test_ddp_02_a_sweep_has_one_folder_and_each_job_its_settings_in_both_processes(workspace: Path) -> None:
    rates = ("0.1", "0.01")
    trace = "+callbacks.trace._target_=leyden.callbacks.trace.Trace"
    run("-m", "experiment=regression", *TWO, f"optim.lr={','.join(rates)}", "trainer.max_epochs=1", trace)
    assert [path.name for path in workspace.iterdir()] == ["outputs"]
    (sweep,) = (workspace / "outputs" / "regression").iterdir()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [job.name for job in jobs] == ["0", "1"]
    assert len(list(workspace.rglob(".hydra"))) == 2
    for job, rate in zip(jobs, rates, strict=True):
        assert yaml.safe_load((job / ".hydra" / "config.yaml").read_text())["optim"]["lr"] == float(rate)
        for name in ("trace.jsonl", "trace1.jsonl"):  # what the optimiser of each process really took
            assert max(row["lr"] for row in read_trace(job / name)) == pytest.approx(float(rate), rel=0.01)


# ---- DDP-04, DDP-06: every sample once, and one split ------------------------------------------------------------


def test_ddp_04_nine_test_samples_are_nine(workspace: Path) -> None:
    write_table("table.csv", 45)
    (workspace / "spy.py").write_text(SPY)
    common = ("experiment=regression", *TABLE, "data.test_frac=0.2", "data.val_frac=0.2", "data.batch_size=4")
    common = (*common, "trainer.max_epochs=2", "engine.precision=64", "+callbacks.spy._target_=spy.Spy")
    run(*common, *ONE)
    run(*common, *TWO)
    one, two = (path.parent for path in sorted(workspace.rglob("run.json")))
    assert read(one / "spy_0.json")["count"] == 9
    assert [read(two / f"spy_{rank}.json")["count"] for rank in (0, 1)] == [4, 5]
    assert read(two / "metrics.json") == pytest.approx(read(one / "metrics.json"), rel=1e-6)
    # To the last digit that is printed
    for name, value in read(one / "metrics.json").items():
        assert f"{value:.4f}" == f"{read(two / 'metrics.json')[name]:.4f}", name


def test_ddp_06_all_processes_and_seeds_have_one_split(workspace: Path) -> None:
    write_table("table.csv", 45)
    (workspace / "spy.py").write_text(SPY)
    common = ("experiment=regression", *TABLE, "trainer.max_epochs=1", "+callbacks.spy._target_=spy.Spy")
    for seed in (1, 2):
        run(*common, *TWO, f"seed={seed}")
    found = [read(path)["data"] for path in workspace.rglob("spy_*.json")]
    assert len(found) == 4
    assert all(data == found[0] for data in found)


# ---- DDP-09: nobody is left --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.5, 3.0, 6.0])
def test_ddp_09_terminated_while_it_starts(workspace: Path, after_s: float) -> None:
    process = subprocess.Popen(
        [*TRAIN, "experiment=regression", *TWO, "trainer.max_epochs=100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) != 0
    _, left = psutil.wait_procs(members[1:], timeout=10)
    assert not left


# ---- DDP-10: the order is that of one process --------------------------------------------------------------------


def test_ddp_10_processes_share_each_batch_in_its_order(workspace: Path) -> None:
    write_table("table.csv", 45)
    trace = "+callbacks.trace._target_=leyden.callbacks.trace.Trace"
    common = ("experiment=regression", *TABLE, "data.batch_size=8", "trainer.max_epochs=2", trace)
    run(*common, *ONE)
    run(*common, *TWO)
    one, two = (path.parent for path in sorted(workspace.rglob("run.json")))
    parts = zip(read_trace(two / "trace.jsonl"), read_trace(two / "trace1.jsonl"), strict=True)
    joined = [first["samples"] + second["samples"] for first, second in parts]
    assert joined == [row["samples"] for row in read_trace(one / "trace.jsonl")]
    assert (one / "order.log").read_text() == (two / "order.log").read_text()
