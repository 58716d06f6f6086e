"""Writing a run folder: run.json and metrics.json, atomically."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only


def write_atomic(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically; values that are not finite are refused, since JSON has none."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def hash_config(config: dict[str, Any]) -> str:
    """Sixteen hex digits that are equal for equal configs."""
    text = json.dumps(config, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunRecord:
    """run.json: what ran, from which code and data, on what, and how it ended.

    Args:
        folder: the run folder.
        config: the resolved config.
        command: the command line.
    """

    def __init__(self, folder: Path, config: dict[str, Any], command: list[str]) -> None:
        self.path = folder / "run.json"
        self.content: dict[str, Any] = {
            "state": "running",
            "reason": None,
            "command": command,
            "working_dir": str(Path.cwd()),
            "config_hash": hash_config(config),
            "seed": config["seed"],
            "start": _now(),
            "end": None,
            **describe_code(),
        }

    @classmethod
    def resumed(cls, folder: Path, config: dict[str, Any], command: list[str]) -> RunRecord:
        """The record of a run that goes on: its start and first command stay, and this command is added."""
        record = cls(folder, config, command)
        if not record.path.is_file():  # it was killed before it wrote any
            return record
        before = json.loads(record.path.read_text(encoding="utf-8"))
        kept = {key: before[key] for key in ("command", "start", "data") if key in before}
        again = [*before.get("resumed", []), {"time": record.content["start"], "command": command}]
        record.content |= {**kept, "resumed": again}
        return record

    def update(self, **facts: Any) -> None:
        """Adds facts and writes the file (the first process of a run only)."""
        self.content |= facts
        if (getattr(rank_zero_only, "rank", 0) or 0) == 0:
            write_json(self.path, self.content)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Records the end: "finished", "failed" or "interrupted"."""
        self.update(state=state, reason=reason, end=_now())


def correct_end(folder: Path, state: str, reason: str) -> None:
    """Records the end of a run for its processes, of which the first may have been killed or knows less."""
    path = folder / "run.json"
    if not path.is_file():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["state"] in ("running", "failed"):
        write_json(path, content | {"state": state, "reason": reason, "end": _now()})


def describe_code() -> dict[str, Any]:
    """The commit of the current folder with its dirty state (null outside a repository), and versions."""
    status = _git("status", "--porcelain")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("leyden", "torch", "lightning", "torchmetrics", "hydra-core")},
        },
        "platform": platform.platform(),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a repository too slow to ask
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> list[str]:
    """The command of this process, as one can type it again."""
    return [Path(sys.executable).name, *sys.argv]
