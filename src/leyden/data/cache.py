"""Folders of prepared data that are built once, whichever process comes first, and whole or not at all."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from leyden.errors import ConfigError


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Builds a folder unless it is there.

    It is built under another name and renamed, so what a process leaves that was killed is never taken for whole.
    Other processes that want the same folder wait.

    Args:
        folder: its place.
        build: fills an empty folder.

    Returns:
        the folder.

    Raises:
        ConfigError: when nothing can be written there.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                for left_over in folder.parent.glob(f".{folder.name}.*.tmp"):
                    shutil.rmtree(left_over)
                temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
                try:
                    build(temporary)
                    os.replace(temporary, folder)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
    except OSError as err:
        raise ConfigError(
            f"Prepared data cannot be written to {folder.absolute()}: {err.strerror or err}. "
            "Make the folder writable (permission, space), or choose another with data.cache_dir=FOLDER."
        ) from err
    return folder


def content_key(settings: Mapping[str, Any], sources: Iterable[Path], classes: Iterable[type]) -> str:
    """A key that changes with whatever may change the prepared data.

    Args:
        settings: of the datamodule, as plain values.
        sources: files and folders that are read: their names, sizes and times of change count.
        classes: whose code reads them: their files count, for Leyden's the whole folder.
    """
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=8)
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                state = path.stat()
                digest.update(f"{path}|{state.st_size}|{state.st_mtime_ns}".encode())
    for path in sorted(set(_code_of(classes))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _code_of(classes: Iterable[type]) -> Iterator[Path]:
    for one in classes:
        for ancestor in inspect.getmro(one):
            package = ancestor.__module__.partition(".")[0]
            module = inspect.getmodule(ancestor)
            file = getattr(module, "__file__", None)
            if file is None or package in ("builtins", "lightning", "torch", "typing"):
                continue
            yield from Path(file).parent.glob("*.py") if package == "leyden" else [Path(file)]
