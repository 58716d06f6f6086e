"""A stopped run goes on in its folder as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
# A constant rate without warm-up, since other rates depend on how many epochs are planned
CONSTANT = ("schedule=constant", "schedule.warmup_frac=0.0")
EXPERIMENTS = {
    "dropout": ("experiment=regression_diabetes", *CONSTANT),
    "augmentation": ("experiment=vision", *CONSTANT, "trainer.limit_train_batches=5"),
    "accumulation": ("experiment=regression", *CONSTANT, "engine.accumulate_batches=3", "optim=muon"),
}


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


def assert_equal_runs(first: Path, second: Path) -> None:
    for name in ("last", "best"):
        a, b = weights(first, name), weights(second, name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    for name in ("metrics.json", "history.csv"):
        assert (first / name).read_text() == (second / name).read_text(), name
    points = scalar_points(first), scalar_points(second)
    assert points[0].keys() == points[1].keys()
    for tag in points[0]:
        if not tag.startswith("test/") and tag not in ("objective", "epoch"):  # of the test when it stopped
            assert points[0][tag] == points[1][tag], tag


def scalar_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> points of all event files of a run, in their order."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("arguments", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_two_epochs_and_two_more_are_four(train: Callable, arguments: tuple[str, ...]) -> None:
    straight = train(*arguments, "trainer.max_epochs=4")
    stopped = train(*arguments, "trainer.max_epochs=2")
    folder = stopped.folder
    resumed = train(f"resume={folder}", "trainer.max_epochs=4")
    assert resumed.exit_code == 0, resumed.output
    assert resumed.folders == []  # in the folder of the run
    assert "Resuming after 2 epochs" in resumed.output
    assert_equal_runs(straight.folder, folder)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["state"] == "finished"
    assert len(record["resumed"]) == 1


def test_stop_within_an_epoch(train: Callable) -> None:
    arguments = ("experiment=regression_diabetes", "schedule=constant", "trainer.val_check_interval=3")
    straight = train(*arguments, "trainer.max_steps=20", "trainer.max_epochs=9")
    stopped = train(*arguments, "trainer.max_steps=12", "trainer.max_epochs=9")
    resumed = train(f"resume={stopped.folder}", "trainer.max_steps=20")
    assert resumed.exit_code == 0, resumed.output
    for name, value in weights(straight.folder).items():
        assert torch.equal(value, weights(stopped.folder)[name]), name


def test_each_checkpoint_is_read_once(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = train(*EXPERIMENTS["dropout"], "trainer.max_epochs=2")
    read: list[str] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda path, **options: read.append(Path(path).name) or load(path, **options))
    resumed = train(f"resume={stopped.folder}", "trainer.max_epochs=3")
    assert resumed.exit_code == 0, resumed.output
    assert read == ["last.ckpt", "best.ckpt"]  # to go on, and to test


def test_last_names_the_newest_run(train: Callable) -> None:
    train("experiment=regression_line", "trainer.max_epochs=1")
    newest = train("experiment=regression", "trainer.max_epochs=1").folder
    resumed = train("resume=last", "trainer.max_epochs=2")
    assert resumed.exit_code == 0, resumed.output
    assert f"Run folder: {newest}" in resumed.output


def test_killed_run_goes_on(train: Callable, workspace: Path) -> None:
    arguments = ["experiment=regression_diabetes", "trainer.max_epochs=300", "callbacks.progress=null"]
    straight = train(*arguments)
    command = [sys.executable, str(ROOT / "train.py"), *arguments, "paths.outputs=killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(workspace.glob("killed/*/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (folder,) = (path.parent for path in workspace.glob("killed/*/*/run.json"))
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["state"] == "running"
    time.sleep(1)  # event files are read in the order of the seconds in which they were begun
    resumed = train(f"resume={folder}", "paths.outputs=killed")
    assert resumed.exit_code == 0, resumed.output
    assert_equal_runs(straight.folder, folder)


def test_finished_run_has_nothing_left(train: Callable) -> None:
    run = train("experiment=regression", "trainer.max_epochs=2")
    before = (run.folder / "metrics.json").read_text()
    again = train(f"resume={run.folder}")
    assert again.exit_code == 1
    assert "it is at epoch 2 of 2 (step 16). Raise trainer.max_epochs to go on." in again.output
    assert (run.folder / "metrics.json").read_text() == before
    assert json.loads((run.folder / "run.json").read_text(encoding="utf-8"))["state"] == "finished"


def test_other_settings_are_refused_by_name_unless_forced(train: Callable) -> None:
    run = train("experiment=regression", "trainer.max_epochs=1")
    changed = ("optim.lr=0.5", "data.batch_size=16", "trainer.max_epochs=2")
    refused = train(f"resume={run.folder}", *changed)
    assert refused.exit_code == 1
    assert "data.batch_size (32 -> 16); optim.lr (0.003 -> 0.5)" in refused.output
    assert "resume_force=true" in refused.output
    forced = train(f"resume={run.folder}", *changed, "resume_force=true")
    assert forced.exit_code == 0, forced.output


def test_other_data_is_refused(train: Callable, workspace: Path) -> None:
    rows = [f"{x},{2 * x}" for x in range(40)]
    (workspace / "t.csv").write_text("\n".join(["x,y", *rows]))
    run = train("experiment=regression", "data=table", "data.path=t.csv", "data.target=y", "trainer.max_epochs=1")
    (workspace / "t.csv").write_text("\n".join(["x,y", *rows[:-1], "39,0"]))
    refused = train(f"resume={run.folder}", "trainer.max_epochs=2")
    assert refused.exit_code == 1
    assert "has changed since it started" in refused.output or "target_mean" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resume=nowhere",), "nowhere, which is not a run folder"),
        (("resume=last",), "there is no run below"),
        (("-m", "resume=last", "seed=0,1"), "cannot be combined with a sweep"),
    ],
)
def test_no_such_run(train: Callable, arguments: tuple[str, ...], message: str) -> None:
    result = train(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert result.folders == []


def damage(path: Path) -> None:
    """Turns over one bit of the largest record, as a bad disk does; the length stays."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
        content = archive.read(record)
    whole = path.read_bytes()
    assert whole.count(content) == 1
    position = whole.index(content) + len(content) // 2
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("harm", [damage, truncate])
def test_damaged_checkpoint_is_replaced_by_the_one_before(train: Callable, harm: Callable[[Path], None]) -> None:
    straight = train("experiment=regression_diabetes", *CONSTANT, "trainer.max_epochs=4")
    each = "callbacks.checkpoint.min_interval_s=0"
    folder = train("experiment=regression_diabetes", *CONSTANT, "trainer.max_epochs=3", each).folder
    harm(folder / "checkpoints" / "last.ckpt")
    resumed = train(f"resume={folder}", "trainer.max_epochs=4")
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"last\.ckpt .*damaged.* Going on from .*last-1\.ckpt, the one before", resumed.output)
    assert "Resuming after 2 epochs" in resumed.output
    assert_equal_runs(straight.folder, folder)
    assert (folder / "checkpoints" / "last.ckpt.damaged").is_file()


def test_damaged_checkpoints_only(train: Callable) -> None:
    folder = train("experiment=regression", "trainer.max_epochs=1").folder
    truncate(folder / "checkpoints" / "last.ckpt")
    result = train(f"resume={folder}", "trainer.max_epochs=2")
    assert result.exit_code == 1
    assert "so it is damaged" in result.output


def test_run_that_stopped_before_its_first_state_starts_again_in_its_folder(train: Callable) -> None:
    straight = train("experiment=regression", "trainer.max_epochs=2")
    folder = train("experiment=regression", "trainer.max_epochs=2").folder
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.json").unlink()
    (folder / "run.json").unlink()
    resumed = train(f"resume={folder}")
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming after 0 epochs (step 0)" in resumed.output
    assert_equal_runs(straight.folder, folder)
