"""The system stops a run: a scheduler, the keyboard, or a folder with an odd name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import Result

from leyden.engine.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[3]
LONG = ("experiment=regression", "trainer.max_epochs=100000", "hardware.num_threads=1")


def start(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a process group of its own; it has saved a state when this returns."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(workspace.rglob("last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def folder_of(workspace: Path) -> Path:
    (record,) = workspace.rglob("run.json")
    return record.parent


def test_sys_01_sigterm_saves_ends_with_143_and_the_run_goes_on(workspace: Path, train: Callable) -> None:
    process = start(workspace, *LONG)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143, output
    folder = folder_of(workspace)
    step = read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert f"The run was terminated by SIGTERM at step {step}." in output
    assert not (folder / "metrics.json").exists()  # no test
    epochs = step // 8 + 1
    resumed = train(f"resume={folder}", f"trainer.max_epochs={epochs}")
    assert resumed.exit_code == 0, resumed.output
    assert f"(step {step})" in resumed.output
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == 8 * epochs


@pytest.mark.parametrize("times", [1, 2])
def test_sys_03_ctrl_c(workspace: Path, times: int) -> None:
    process = start(workspace, *LONG)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    folder = folder_of(workspace)
    read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert not (folder / "metrics.json").exists()
    assert not [other for other in psutil.process_iter() if other.pid != process.pid and group_of(other) == process.pid]


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def test_sys_04_blanks_and_letters_of_other_scripts(
    train: Callable, workspace: Path, monkeypatch: pytest.MonkeyPatch, leyden: Callable[..., Result]
) -> None:
    place = workspace / "prøj ect 模型"
    place.mkdir()
    monkeypatch.chdir(place)
    run = train("experiment=regression", "trainer.max_epochs=1", "paths.outputs='läufe 一'")
    assert run.exit_code == 0, run.output
    (record,) = place.rglob("run.json")
    assert record.parent.parent.parent == place / "läufe 一"
    again = train(f"resume={record.parent.relative_to(place)}", "trainer.max_epochs=2")
    assert again.exit_code == 0, again.output
    assert leyden("evaluate", record.parent).exit_code == 0
