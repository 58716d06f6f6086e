"""What a run folder is written with: whole files or none, plain JSON, the state of the run and of the code."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

import leyden
from leyden.runs import folder as run_folder
from leyden.runs.folder import RunRecord, command_line, describe_code, hash_config, write_atomic, write_json

CONFIG: dict[str, Any] = {"seed": 0, "optim": {"lr": 0.1, "betas": [0.9, 0.999]}, "name": "größe"}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    write_atomic(path, "old")
    seen: list[str] = []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        seen.append(Path(target).read_text())  # until the last moment a reader sees the old content
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    write_atomic(path, "new é")
    assert seen == ["old"]
    assert path.read_text(encoding="utf-8") == "new é"
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]


def test_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("replace"), replace(self, target)))
    write_atomic(tmp_path / "x.txt", "text")
    assert calls == ["fsync", "replace"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    write_atomic(path, "old")

    def fail(file: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_json_is_readable_by_people(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": [1, 2.5], "a": "größe"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == (
        '{\n  "b": [\n    1,\n    2.5\n  ],\n  "a": "größe"\n}\n'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_value_that_is_not_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": value})
    assert list(tmp_path.iterdir()) == []


def test_hash_is_that_of_the_content_and_not_of_the_order() -> None:
    assert hash_config(CONFIG) == hash_config(dict(reversed(CONFIG.items())))
    assert hash_config(CONFIG) != hash_config(CONFIG | {"seed": 1})
    assert hash_config(CONFIG) != hash_config(CONFIG | {"optim": {"lr": 0.1, "betas": [0.999, 0.9]}})
    # `printf %s '{"seed": 0}' | sha256sum`, its first 16 digits
    assert hash_config({"seed": 0}) == "de7d7744ccd7722e"


def test_record_follows_a_run(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, CONFIG, ["python", "train.py", "seed=0"])
    record.update(hardware="CPU", data={"train": {"num_samples": 3}})
    found = read(tmp_path / "run.json")
    assert found["state"] == "running"
    assert found["end"] is None
    assert found["command"] == ["python", "train.py", "seed=0"]
    assert found["working_dir"] == str(Path.cwd())
    assert found["config_hash"] == hash_config(CONFIG)
    assert found["seed"] == 0
    assert found["hardware"] == "CPU"
    assert found["data"] == {"train": {"num_samples": 3}}
    record.finish("finished")
    found = read(tmp_path / "run.json")
    assert (found["state"], found["reason"]) == ("finished", None)
    start, end = (datetime.fromisoformat(found[key]) for key in ("start", "end"))
    assert start.utcoffset() == timedelta(0)
    assert timedelta(0) <= end - start < timedelta(minutes=1)


def test_record_of_a_failed_run_has_the_reason(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, CONFIG, [])
    record.finish("failed", "DataError: no such file")
    found = read(tmp_path / "run.json")
    assert (found["state"], found["reason"]) == ("failed", "DataError: no such file")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_code_is_the_commit_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "x.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "x")
    monkeypatch.chdir(tmp_path)
    code = describe_code()
    assert code["commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert code["dirty"] is False
    (tmp_path / "x.py").write_text("2")
    assert describe_code()["dirty"] is True


def test_code_outside_a_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    code = describe_code()
    assert (code["commit"], code["dirty"]) == (None, None)
    assert code["versions"]["leyden"] == leyden.__version__
    assert code["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert code["versions"]["lightning"] == lightning.__version__
    assert code["versions"]["python"] == platform.python_version()


def test_machine_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(run_folder.subprocess, "run", missing)
    assert describe_code()["commit"] is None


def test_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1", "data.path=a b.csv"])
    assert command_line() == [Path(sys.executable).name, "train.py", "seed=1", "data.path=a b.csv"]
