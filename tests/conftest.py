"""Fixtures that run Leyden as a user does, in folders with names that need care."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Result:
    """How a run in this process ended.

    Attributes:
        exit_code: 0 when it ended well.
        output: what it printed, both streams.
        folders: the run folders it made, oldest first.
    """

    exit_code: int
    output: str
    folders: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run folder, where there is just one."""
        assert len(self.folders) == 1, f"{len(self.folders)} run folders; output:\n{self.output}"
        return self.folders[0]

    @property
    def metrics(self) -> dict[str, float]:
        """metrics.json of the run."""
        return json.loads((self.folder / "metrics.json").read_text(encoding="utf-8"))

    @property
    def record(self) -> dict[str, Any]:
        """run.json of the run."""
        return json.loads((self.folder / "run.json").read_text(encoding="utf-8"))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder whose name has a blank, an equals sign and letters beyond ASCII."""
    folder = tmp_path / "a b=c é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def train(
    workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Runs `python train.py ARGUMENTS` in this process (imports are paid once) in `workspace`."""
    monkeypatch.setattr(logging, "raiseExceptions", True)

    def run(*arguments: str) -> Result:
        from leyden.entry import train as train_entry

        before = set(run_folders(workspace))
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        capfd.readouterr()
        exit_code = 0
        with warnings.catch_warnings():
            try:
                train_entry()
            except SystemExit as end:
                exit_code = end.code if isinstance(end.code, int) else 1
            except Exception as err:  # what the interpreter would print as a traceback
                print(f"Traceback: {type(err).__name__}: {err}", file=sys.stderr)
                exit_code = 1
            finally:
                close_log_files()
        captured = capfd.readouterr()
        folders = sorted(set(run_folders(workspace)) - before)
        return Result(exit_code, captured.out + captured.err, folders)

    yield run
    logging.captureWarnings(False)


def run_folders(workspace: Path) -> list[Path]:
    """Folders below outputs/ that hold a run (each has its .hydra)."""
    return [path.parent for path in (workspace / "outputs").rglob(".hydra")]


def close_log_files() -> None:
    """Ends the log files that Hydra opened for a run in this process."""
    for handler in list(logging.getLogger("leyden.order").handlers):
        logging.getLogger("leyden.order").removeHandler(handler)
        handler.close()
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, logging.FileHandler) or getattr(handler, "stream", None) in (sys.stdout, sys.__stdout__):
            logging.getLogger().removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True)
def _single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
