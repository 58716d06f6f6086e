"""Imports point one way, files stay small, nothing unfinished is left."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "leyden"
DOMAINS = {"regression", "vision", "nlp"}

# room -> rooms of Leyden it may import; `wiring` and `runner` sit on top.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "sharding": set(),
    "nets": {"errors"},
    "config": {"engine", "errors", "hardware", "signatures"},
    "data": {"errors"},
    "hardware": {"errors", "sharding"},
    "engine": {"data", "errors", "nets", "sharding"},
    "callbacks": {"config", "data", "errors", "sharding"},
    "runs": {"callbacks", "config", "data", "engine", "errors", "hardware", "sharding", "signatures", "wiring"},
    "regression": {"data", "engine", "errors", "nets", "sharding"},
    "vision": {"data", "engine", "errors", "nets"},
    "nlp": {"data", "engine", "errors", "nets"},
    "wiring": {"callbacks", "config", "data", "engine", "errors", "hardware", "launch", "signatures"},
    "runner": {"callbacks", "config", "data", "engine", "errors", "hardware", "launch", "runs", "sharding", "wiring"},
    "advice": {"config", "errors", "signatures"},
    "entry": {"advice", "config", "errors", "launch", "runner", "runs", "worker"},
    "signatures": {"errors"},
    "launch": {"errors"},
    "worker": {"errors", "launch", "runner", "runs"},
    "cli": {"errors", "entry", "runs"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("leyden.")}
    return rooms


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "__init__.py" or f.parent != SOURCE], ids=str)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{path}: a new room needs a place in docs/architecture.md and here"
    assert imported_rooms(path) - {room} <= ALLOWED[room]


def test_only_wiring_and_restore_instantiate() -> None:
    users = {str(f.relative_to(SOURCE)) for f in FILES if "import instantiate" in f.read_text(encoding="utf-8")}
    assert users == {"wiring.py", "runs/restore.py"}


def test_data_knows_neither_engine_nor_hydra() -> None:
    for path in (SOURCE / "data").glob("*.py"):
        assert not re.search(r"^\s*(from|import) (hydra|omegaconf)", path.read_text(encoding="utf-8"), re.M), path


def test_domains_have_their_three_files_and_no_drawer_exists() -> None:
    for domain in DOMAINS:
        assert {"data.py", "nets.py", "task.py"} <= {path.name for path in (SOURCE / domain).iterdir()}
    drawers = {"utils", "common", "helpers", "misc"}
    assert not drawers & {path.stem for path in SOURCE.rglob("*")}


def test_files_stay_small() -> None:
    long = {str(f.relative_to(ROOT)): n for f in FILES if (n := len(f.read_text().splitlines())) > 400}
    assert not long


def test_import_of_leyden_does_not_load_torch() -> None:
    code = "import sys, leyden, leyden.entry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
