"""Checkpoint files: written beside the training, whole or not at all, and read with their checksums."""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from leyden.errors import DataError, TrainingError

log = logging.getLogger(__name__)


@dataclass
class Held:
    """A copied state that waits in memory to be written.

    Attributes:
        checkpoint: the state, on the host.
        path: its place.
        options: those of `write_checkpoint`.
    """

    checkpoint: dict[str, Any]
    path: Path
    options: dict[str, Any]


class CheckpointWriter(TorchCheckpointIO):
    """Writes checkpoints in a thread of its own: training waits only while the state is copied to the host.

    A file is written under another name, flushed to the disk and renamed, so that a reader, or a run that was
    killed, never sees a part of one. A new checkpoint waits for the one before it, and raises what went wrong with it.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._held: Held | None = None
        self._lent: tuple[Path, dict[str, Any]] | None = None
        # Memory of the last copy, which the next one takes again: new memory costs several times the copying
        self._copies: list[Tensor] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copies the state and starts to write it.

        Args:
            checkpoint: tensors and plain values.
            path: its place.
            storage_options: those of `write_checkpoint`, and `hold`: keep the copy in memory. It is written when all
                is (`wait`), or before the next state, unless that takes its second place (`also`) from it.
        """
        options = dict(storage_options or {})
        hold = options.pop("hold", False)
        self._join()
        self._lent = None
        held, self._held = self._held, None
        if held is not None and held.options["also"] != options.get("also"):
            self._start_writing(held.checkpoint, held.options["also"])
            self._copies = []
        old, self._copies = iter(self._copies), []
        copied = apply_to_collection(checkpoint, Tensor, lambda tensor: self._copy_to_host(tensor, next(old, None)))
        if hold:
            self._held = Held(copied, Path(path), options)
        else:
            self._start_writing(copied, Path(path), **options)

    def _start_writing(self, checkpoint: dict[str, Any], path: Path, **options: Any) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(self._thread.submit(write_checkpoint, checkpoint, path, **options))

    def _copy_to_host(self, tensor: Tensor, old: Tensor | None) -> Tensor:
        fits = old is not None and (old.shape, old.dtype, old.layout) == (tensor.shape, tensor.dtype, tensor.layout)
        copy = old.copy_(tensor) if old is not None and fits else tensor.detach().to("cpu", copy=True)
        self._copies.append(copy)
        return copy

    def _join(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def wait(self) -> None:
        """Waits until all is on the disk.

        Raises:
            TrainingError: when it could not be written.
        """
        held, self._held = self._held, None
        if held is not None:
            self._start_writing(held.checkpoint, held.path, **held.options)
        self._join()

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Reads a checkpoint; never executes anything in it."""
        self.wait()
        lent, self._lent = self._lent, None
        return lent[1] if lent is not None and lent[0] == Path(path) else read_checkpoint(Path(path))

    def lend(self, path: Path, content: dict[str, Any]) -> None:
        """Takes what was read of a checkpoint, so that it is not read again if it is the next to be loaded."""
        self._lent = path, content

    def teardown(self) -> None:
        """Waits, and ends the thread. What could not be written is logged, since another error may be on its way."""
        try:
            self.wait()
        except TrainingError as err:
            log.error("%s", err)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._copies.clear()


def write_checkpoint(checkpoint: dict[str, Any], path: Path, keep: int = 1, also: Path | None = None) -> None:
    """Writes a checkpoint, atomically.

    Args:
        checkpoint: tensors and plain values.
        path: its place, such as `last.ckpt`.
        keep: how many stay there in all: what was at `path` becomes `last-1.ckpt`, and so on.
        also: a second place that gets the same content, such as `best.ckpt`.

    Raises:
        TrainingError: when that is not possible (no space, no permission); the files before it are still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if also is not None:
            _share(temporary, also)
        for older, newer in zip(kept_paths(path, keep)[:0:-1], kept_paths(path, keep)[-2::-1], strict=True):
            if newer.is_file():
                newer.replace(older)
        temporary.replace(path)
    except (OSError, RuntimeError) as err:  # torch's writer says RuntimeError where the disk is full
        system = err if isinstance(err, OSError) else err.__context__  # which hides the system's own words
        reason = system.strerror if isinstance(system, OSError) and system.strerror else str(err).splitlines()[0]
        there = [str(found) for found in kept_paths(path, max(keep, 2)) if found.is_file()]
        last = f"The last good checkpoint is {there[0]}." if there else "There is no checkpoint yet."
        raise TrainingError(
            f"The checkpoint {path} could not be written: {reason}. {last} "
            "Make space or the folder writable, then go on with resume=RUN_FOLDER."
        ) from err
    finally:
        with suppress(OSError):  # it is not there, or cannot be: what went wrong is on its way
            temporary.unlink()


def kept_paths(path: Path, keep: int) -> list[Path]:
    """Where the newest `keep` checkpoints of a place are, newest first: last.ckpt, last-1.ckpt, ..."""
    return [path, *(path.with_name(f"{path.stem}-{age}{path.suffix}") for age in range(1, keep))]


def _share(source: Path, target: Path) -> None:
    """Puts the content of a file at a second place, without a second write where the file system has hard links."""
    temporary = source.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint on the CPU after a look at its checksums; executes nothing in it.

    Raises:
        DataError: when it is not there, damaged, or Leyden did not write it.
    """
    if not path.is_file():
        raise DataError(f"There is no checkpoint {path.absolute()}.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # compares each record with its CRC-32, which torch.load does not
        if damaged is not None:
            raise DataError(f"{path.absolute()} is damaged: the checksum of {damaged} is wrong.")
        content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except DataError:
        raise
    except Exception as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise DataError(f"{path.absolute()} does not load as a checkpoint, so it is damaged: {reason}.") from err
    if "leyden" not in content:
        raise DataError(f"{path.absolute()} was not written by Leyden: it has no config.")
    return content
