"""Folders of prepared data that are built once, whichever process comes first, and whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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
