"""Runs of several processes on one machine, as commands: folders, logs, signals, lost processes, and who is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from leyden.engine.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "train.py")]
TWO = ("hardware=ddp", "hardware.accelerator=cpu", "hardware.devices=2", "hardware.num_threads=1")
LONG = ("experiment=regression", *TWO, "trainer.max_epochs=100000")


def records(workspace: Path) -> list[Path]:
    return sorted(path.parent for path in workspace.rglob("run.json"))


def record_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


def check_hashes(folder: Path) -> None:
    """Both processes had the config that the record of the run tells of."""
    found = re.findall(r"Process 1, config hash (\w+)", (folder / "rank_1.log").read_text(encoding="utf-8"))
    assert found == [record_of(folder)["config_hash"]]


class Running:
    """A command that trains, and the processes that it started."""

    def __init__(self, workspace: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*TRAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while not list(workspace.rglob("last.ckpt")) and time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.members = sorted(children, key=lambda child: int(child.environ().get("RANK", "-1")))
        assert [child.environ()["RANK"] for child in self.members] == ["0", "1"]
        (self.folder,) = records(workspace)

    def end(self, timeout_s: float = 60) -> str:
        """Waits for the command, and checks that nothing of it is left."""
        output, _ = self.process.communicate(timeout=timeout_s)
        _, left = psutil.wait_procs(self.members, timeout=1)
        assert not left, f"still there: {left}; output: {output}"
        return output


@pytest.fixture(autouse=True)
def _nothing_is_left(workspace: Path) -> Iterator[None]:
    yield
    left = [process for process in psutil.process_iter() if _works_in(process, workspace)]
    for process in left:
        process.kill()
    assert not left


def _works_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is one of a run that was started in a folder; other tests may run at the same time."""
    try:
        return "leyden.worker" in process.cmdline() and Path(process.cwd()) == folder
    except psutil.Error:
        return False


def test_sweep_of_runs_with_two_processes(workspace: Path) -> None:
    arguments = ("experiment=regression", *TWO, "optim.lr=shuffle(0.1,0.03,0.01)", "trainer.max_epochs=2")
    done = subprocess.run([*TRAIN, "-m", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = (workspace / "outputs" / "regression").iterdir()
    jobs = records(workspace)
    assert [job.relative_to(sweep).parts for job in jobs] == [("0",), ("1",), ("2",)]
    rates = []
    for job in jobs:
        check_hashes(job)
        assert record_of(job)["state"] == "finished"
        assert len(list(job.rglob("events.out.tfevents.*"))) == 1
        rates.append(yaml.safe_load((job / ".hydra" / "config.yaml").read_text())["optim"]["lr"])
        saved = read_checkpoint(job / "checkpoints" / "last.ckpt")
        assert saved["leyden"]["config"]["optim"]["lr"] == rates[-1]
    assert sorted(rates) == [0.01, 0.03, 0.1]


def test_failing_job_of_a_sweep_leaves_the_next_alone(workspace: Path) -> None:
    (workspace / "faulty.py").write_text(FAULTY)
    arguments = ("experiment=regression", *TWO, "trainer.max_epochs=2", "+callbacks.faulty._target_=faulty.Faulty")
    command = [*TRAIN, "-m", *arguments, "+callbacks.faulty.rank=1,-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, second = records(workspace)
    assert record_of(first)["state"] == "failed"
    assert "Process 1 of 2" in record_of(first)["reason"]
    assert "failed with ValueError: broken on purpose" in record_of(first)["reason"]
    assert "broken on purpose" in (first / "rank_1.log").read_text()
    assert "Process 1 of 2" in done.stdout
    assert record_of(second)["state"] == "finished"


FAULTY = """
from lightning.pytorch import Callback

class Faulty(Callback):
    def __init__(self, rank: int):
        self.rank = rank

    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            raise ValueError("broken on purpose")
"""


NOTED = """
import json, os
from lightning.pytorch import Callback

class Noted(Callback):
    def __init__(self, **values):
        with open(f"rank_{os.environ['RANK']}.json", "w") as file:
            json.dump(values, file)
"""


def test_text_that_needs_care_reaches_all_processes(workspace: Path) -> None:
    """The values of the command line are read once; `${now:}` has one time for all."""
    (workspace / "noted.py").write_text(NOTED)
    key = "+callbacks.noted"
    text = 'a "b" $HOME, ü=%d \\x'
    odd = (f"{key}._target_=noted.Noted", f"{key}.text='{text}'", f"{key}.time='${{now:%H%M%S%f}}'")
    odd = (*odd, f"{key}.many=[1,{{a: null}}]", "~logger.tensorboard", "paths.outputs='o ut=1 é'")
    command = [*TRAIN, "experiment=regression", *TWO, *odd, "trainer.max_epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = records(workspace)
    assert folder.is_relative_to(workspace / "o ut=1 é")
    check_hashes(folder)
    first, second = (json.loads((workspace / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["text"] == text
    assert first["many"] == [1, {"a": None}]


@pytest.mark.parametrize("told", ["command", "first", "second", "all"])
def test_signal_to_any_process_saves_once_and_ends_all(workspace: Path, told: str) -> None:
    run = Running(workspace, *LONG)
    pids = [run.process.pid, *(member.pid for member in run.members)]
    for pid in {"command": pids[:1], "first": pids[1:2], "second": pids[2:], "all": pids}[told]:
        os.kill(pid, signal.SIGTERM)
    output = run.end()
    assert run.process.returncode == 143, output
    record = record_of(run.folder)
    assert (record["state"], record["reason"]) == ("terminated", "terminated by SIGTERM")
    step = read_checkpoint(run.folder / "checkpoints" / "last.ckpt")["global_step"]
    assert f"at step {step}." in output
    assert output.count("Go on with: python train.py resume=outputs/") == 1
    assert "Traceback" not in output + (run.folder / "rank_1.log").read_text()


def test_keyboard_reaches_the_processes_once(workspace: Path) -> None:
    run = Running(workspace, *LONG)
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    output = run.end()
    assert run.process.returncode == 130, output
    assert record_of(run.folder)["state"] == "interrupted"


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_process_ends_the_run_which_goes_on_in_one(workspace: Path, lost: int) -> None:
    run = Running(workspace, *LONG)
    run.members[lost].kill()
    began = time.monotonic()
    output = run.end()
    assert time.monotonic() - began < 15
    assert run.process.returncode == 1
    text = f"Process {lost} of 2 (pid {run.members[lost].pid}) was killed by SIGKILL"
    assert text in output
    assert "Traceback" not in output
    assert record_of(run.folder)["state"] == "failed"
    assert text in record_of(run.folder)["reason"]
    epochs = read_checkpoint(run.folder / "checkpoints" / "last.ckpt")["epoch"] + 3
    one = ("hardware.strategy=auto", "hardware.devices=1", f"trainer.max_epochs={epochs}")
    resumed = subprocess.run([*TRAIN, f"resume={run.folder}", *one], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert record_of(run.folder)["state"] == "finished"


def test_processes_end_with_a_killed_command(workspace: Path) -> None:
    run = Running(workspace, *LONG)
    run.process.kill()
    run.process.communicate(timeout=10)
    _, left = psutil.wait_procs(run.members, timeout=10)
    assert not left


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *TRAIN[1:], *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_torchrun_makes_one_run_folder(workspace: Path) -> None:
    arguments = ("experiment=regression", "hardware=ddp", "hardware.accelerator=cpu", "trainer.max_epochs=2")
    done = torchrun(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = records(workspace)
    assert len(list(workspace.rglob(".hydra"))) == 1
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1
    assert record_of(folder)["state"] == "finished"
    check_hashes(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hardware=cpu",), "torchrun started 2 processes on this machine, but `hardware.strategy` is auto"),
        ((*TWO[:2], "hardware.devices=3"), "`hardware.devices` is 3"),
        (("-m", *TWO, "seed=0,1"), "A sweep (-m) cannot be started by torchrun"),
        (("data.batch_sise=3",), "batch_sise"),
    ],
)
def test_torchrun_with_what_cannot_be(workspace: Path, arguments: tuple[str, ...], message: str) -> None:
    done = torchrun(*arguments, "experiment=regression")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_torchrun_help_ends(workspace: Path) -> None:
    done = torchrun("--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Trains and tests an experiment") == 1
