"""A run that is told to stop finishes its step, saves, says how to go on, and goes on exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.engine.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]

# A callback that sends a signal to its own process, once, at a chosen place.
BOMB = """
import os, signal
from pathlib import Path
from lightning.pytorch import Callback


class Bomb(Callback):
    def __init__(self, hook: str, count: int, number: int):
        self.count = count

        def strike(trainer, *args, **kwargs):
            if trainer.sanity_checking != (hook == "on_sanity_check_start"):
                return
            self.count -= 1
            if self.count == 0 and not Path("struck").exists():
                Path("struck").touch()
                os.kill(os.getpid(), number)

        setattr(self, hook, strike)
"""

# 9 batches an epoch of which a call takes 4; validation in 3 batches
SMALL = (
    "experiment=regression_diabetes",
    "data.batch_size=32",
    "engine.steps_per_execution=4",
    "trainer.max_epochs=4",
    "trainer.log_every_n_steps=4",
)


def bomb(hook: str, count: int, number: int = signal.SIGTERM) -> tuple[str, ...]:
    Path("bomb.py").write_text(BOMB)
    key = "+callbacks.bomb"
    return (f"{key}._target_=bomb.Bomb", f"{key}.hook={hook}", f"{key}.count={count}", f"{key}.number={int(number)}")


@pytest.fixture
def straight(train: Callable) -> Path:
    return train(*SMALL).folder


@pytest.mark.parametrize(
    ("hook", "count", "step"),
    [
        ("on_train_start", 1, 0),
        ("on_train_batch_end", 4, 13),  # in the second epoch, after its first call
        ("on_train_batch_end", 6, 18),  # after the last call of the second epoch, before its validation
        ("on_validation_batch_start", 2, 9),
        ("on_validation_end", 2, 18),
        ("on_train_epoch_end", 3, 27),
        ("on_validation_batch_start", 10, 36),  # in the validation of the last epoch
        ("on_train_end", 1, 36),
        ("on_test_batch_start", 1, 36),
    ],
)
def test_stop_anywhere_and_go_on(train: Callable, straight: Path, hook: str, count: int, step: int) -> None:
    stopped = train(*SMALL, *bomb(hook, count))
    assert stopped.exit_code == 143, stopped.output
    assert "The run was terminated by SIGTERM" in stopped.output
    assert stopped.record["state"] == "terminated"
    assert not (stopped.folder / "metrics.json").exists()
    if step:
        assert read_checkpoint(stopped.folder / "checkpoints" / "last.ckpt")["global_step"] == step
        assert "Go on with: python train.py resume=outputs/" in stopped.output
    resumed = train(f"resume={stopped.folder}")
    assert resumed.exit_code == 0, resumed.output
    assert f"(step {step})" in resumed.output
    for name in ("metrics.json", "history.csv"):
        assert (straight / name).read_text() == (stopped.folder / name).read_text(), name


@pytest.mark.parametrize(
    ("hook", "count", "step"),
    [
        ("on_validation_batch_start", 2, 4),  # while the average is in the network, within an epoch
        ("on_validation_end", 3, 15),  # obeyed after the next call, of two steps
        ("on_validation_batch_start", 11, 17),
    ],
)
def test_stop_while_the_average_is_validated(train: Callable, hook: str, count: int, step: int) -> None:
    # validated after steps 4 and 8 of each 9
    averaged = (*SMALL, "engine.ema_decay=0.9", "trainer.val_check_interval=4", "model.net.dropout=0.1")
    straight = train(*averaged)
    stopped = train(*averaged, *bomb(hook, count))
    assert stopped.exit_code == 143, stopped.output
    at_stop = read_checkpoint(stopped.folder / "checkpoints" / "last.ckpt")
    assert at_stop["global_step"] == step
    assert at_stop["ema"]["weights"] == "ema"
    assert not at_stop["state_dict"]["net.head.bias"].equal(at_stop["ema"]["raw"]["net.head.bias"])
    resumed = train(f"resume={stopped.folder}")
    assert resumed.exit_code == 0, resumed.output
    for name in ("metrics.json", "history.csv"):
        assert (straight.folder / name).read_text() == (stopped.folder / name).read_text(), name
    for name in ("last.ckpt", "best.ckpt"):
        first, second = (read_checkpoint(run.folder / "checkpoints" / name) for run in (straight, stopped))
        assert all(value.equal(second["state_dict"][key]) for key, value in first["state_dict"].items())
        assert all(value.equal(second["ema"]["raw"][key]) for key, value in first["ema"]["raw"].items())


def test_interrupt_from_the_keyboard(train: Callable) -> None:
    stopped = train(*SMALL, *bomb("on_train_batch_end", 2, signal.SIGINT))
    assert stopped.exit_code == 130
    assert "The run was interrupted by SIGINT at step 8." in stopped.output
    assert stopped.record["state"] == "interrupted"
    assert (stopped.folder / "checkpoints" / "last.ckpt").is_file()


def test_a_sweep_ends_with_the_job_that_was_interrupted(train: Callable, workspace: Path) -> None:
    stopped = train("-m", *SMALL, *bomb("on_train_batch_end", 2, signal.SIGINT), "seed=0,1,2")
    assert stopped.exit_code == 130
    assert len(list(workspace.rglob("run.json"))) == 1


def start(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, which has taken steps when this returns."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(workspace.rglob("last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_sigterm_of_a_real_process(workspace: Path) -> None:
    process = start(workspace, "experiment=regression", "trainer.max_epochs=100000")
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    (folder,) = (path.parent for path in workspace.rglob("run.json"))
    record = json.loads((folder / "run.json").read_text())
    assert (record["state"], record["reason"]) == ("terminated", "terminated by SIGTERM")
    assert "Go on with: python train.py resume=outputs/" in output
    assert "Traceback" not in output
    assert f"at step {read_checkpoint(folder / 'checkpoints' / 'last.ckpt')['global_step']}." in output


def test_second_interrupt_ends_at_once_and_leaves_whole_files(workspace: Path) -> None:
    process = start(workspace, "experiment=regression", "trainer.max_epochs=100000")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    (folder,) = (path.parent for path in workspace.rglob("run.json"))
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    read_checkpoint(folder / "checkpoints" / "last.ckpt")
