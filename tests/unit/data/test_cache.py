"""A folder that is built once: by one of many processes, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leyden.data.cache import build_once
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
