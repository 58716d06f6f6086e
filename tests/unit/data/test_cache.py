"""A folder that is built once: by one of many processes, whole or not at all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.data.cache import build_once, content_key
from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.errors import ConfigError


def write(folder: Path) -> None:
    (folder / "content").write_text("whole")


def test_is_built_once(tmp_path: Path) -> None:
    calls = []
    for _ in range(2):
        found = build_once(tmp_path / "a" / "set", lambda folder: (calls.append(folder), write(folder))[0])
        assert (found / "content").read_text() == "whole"
    assert len(calls) == 1


def test_failure_leaves_nothing_and_the_next_try_builds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        build_once(tmp_path / "set", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert (build_once(tmp_path / "set", write) / "content").is_file()


def test_what_a_killed_process_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    (tmp_path / ".set.x1.tmp").mkdir()
    build_once(tmp_path / "set", write)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["set"]


SCRIPT = """
import sys, time
from pathlib import Path
from leyden.data.cache import build_once
def build(folder):
    with open(sys.argv[2], "a") as file: file.write("built\\n")
    time.sleep(0.5)
    (folder / "content").write_text("whole")
print((build_once(Path(sys.argv[1]), build) / "content").read_text())
"""


def test_several_processes_build_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "set"), str(tmp_path / "log")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=100)[0].strip() for process in running] == ["whole"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Prepared data cannot be written to .*choose another with data\.cache_dir"):
        build_once(tmp_path / "file" / "set", write)


# ---- a datamodule's cache ----------------------------------------------------------------------------------------


class Slow(DataModule):
    """Reads numbers from a file, fits their mean, and counts how often it reads."""

    reads = 0

    def __init__(self, path: str, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.path, self.factor = path, factor
        self.mean = 0.0
        self.settings = {"path": path, "factor": factor, "batch_size": self.batch_size}

    def load_splits(self) -> dict[str, Batch]:
        type(self).reads += 1
        numbers = self.factor * torch.tensor([float(line) for line in Path(self.path).read_text().split()])
        self.mean, self.facts, self.skipped = float(numbers.mean()), {"num_features": 1}, ["line 9"]
        return {"train": {"input": numbers}, "val": {"input": numbers[:0]}, "test": {"input": numbers[:2]}}

    def fitted_state(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_fitted_state(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]

    allows_empty_val = True


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    Slow.reads = 0
    path = tmp_path / "numbers.txt"
    path.write_text("1 2 6")
    return path


def load(path: Path, **options: Any) -> Slow:
    options = {"batch_size": 2, "cache": True, "cache_dir": str(path.parent / "cache"), **options}
    data = Slow(str(path), **options)
    data.setup()
    return data


def test_second_run_reads_nothing_and_has_everything(numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="leyden")
    plain = load(numbers, cache=False)
    first, second = load(numbers), load(numbers, batch_size=3, seed=4)
    assert Slow.reads == 2
    for data in (first, second):
        assert data.splits.keys() == plain.splits.keys()
        assert all(data.splits[name]["input"].equal(plain.splits[name]["input"]) for name in plain.splits)
        assert (data.facts, data.mean, data.skipped) == (plain.facts, 3.0, ["line 9"])
        assert data.fingerprint() == plain.fingerprint()
        assert data.choose_residency().kind == "mmap"
    assert "kept in" in caplog.text
    assert "Data from the cache" in caplog.text


def test_other_settings_or_another_source_are_read_anew(numbers: Path) -> None:
    load(numbers)
    assert load(numbers, factor=2.0).mean == 6.0
    os.utime(numbers, ns=(1, 1))
    load(numbers)
    numbers.write_text("1 2 9")
    assert load(numbers).mean == 4.0
    assert Slow.reads == 4
    assert len([path for path in (numbers.parent / "cache").iterdir() if path.is_dir()]) == 4  # nothing is deleted


def test_key_knows_files_of_folders_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "cat" / "1.txt").write_text("one")
    (tmp_path / "own_reader.py").write_text("class Reader:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_reader  # type: ignore[import-not-found]

    def key() -> str:
        return content_key({"a": 1}, [tmp_path / "set"], [own_reader.Reader])

    keys = [key()]
    assert key() == keys[0]
    (tmp_path / "set" / "cat" / "2.txt").write_text("two")
    keys.append(key())
    (tmp_path / "own_reader.py").write_text("class Reader:\n    other = True\n")
    keys.append(key())
    assert len(set(keys)) == 3
    assert content_key({}, [], [DataModule]) != content_key({}, [], [int])  # Leyden's own code counts
