"""Where the tensors of a data set stay while a run trains: on the device, in memory, or on the disk."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from leyden.data.loaders import Batch
from leyden.errors import ConfigError, is_out_of_memory

log = logging.getLogger(__name__)

Kind = Literal["auto", "device", "host", "mmap", "workers"]

# A set may take this share of what is free on the device; the rest is for the network and its activations.
DEVICE_FRAC = 0.5
HOST_FRAC = 0.7


@dataclass(frozen=True)
class Residency:
    """Where the data stays.

    Attributes:
        kind: "device", "host", "mmap" or "workers".
        reason: why, for people.
    """

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Room:
    """What decides where a set stays.

    Attributes:
        size: of the set, in bytes.
        device: where the network is.
        free_on_device: bytes; on the CPU those of the memory.
        free_in_memory: bytes.
        trims: whether each batch is cut by its content on the host (padding).
        is_mapped: whether the set lies in memory-mapped files already.
    """

    size: int
    device: torch.device
    free_on_device: int
    free_in_memory: int
    trims: bool = False
    is_mapped: bool = False


def choose_residency(wanted: Kind, room: Room) -> Residency:
    """Decides where tensors stay.

    Raises:
        ConfigError: when what is wanted cannot be.
    """
    size = format_bytes(room.size)
    on_cpu = room.device.type == "cpu"
    if wanted == "auto":
        if room.is_mapped:
            return Residency("mmap", f"{size} in memory-mapped files")
        if room.size > HOST_FRAC * room.free_in_memory:
            return Residency("mmap", f"{size} are much for {format_bytes(room.free_in_memory)} of free memory")
        if on_cpu:
            return Residency("host", f"{size}, which the CPU reads in place")
        if room.trims:
            return Residency("host", f"{size} in memory; batches are cut to their content, then copied ahead")
        if room.size <= DEVICE_FRAC * room.free_on_device:
            return Residency("device", f"{size} fit on {room.device}, {format_bytes(room.free_on_device)} free")
        free = format_bytes(room.free_on_device)
        return Residency("host", f"{size} are much for {room.device}, {free} free; batches are copied ahead")
    if wanted == "device" and not on_cpu and room.size > room.free_on_device:
        raise ConfigError(
            f"`data.residency` is device, but the data takes {size} and {room.device} has "
            f"{format_bytes(room.free_on_device)} free. Use data.residency=host."
        )
    if wanted in ("device", "host") and room.is_mapped and room.size > room.free_in_memory:
        raise ConfigError(
            f"`data.residency` is {wanted}, but the data takes {size}, and {format_bytes(room.free_in_memory)} of "
            "memory are free. Use data.residency=mmap."
        )
    if wanted == "device" and on_cpu:
        return Residency("host", f"{size} in memory, which is the device's")
    return Residency(wanted, f"{size}, asked for")


def place(tensors: Batch, device: torch.device, wanted: Kind) -> Batch | None:
    """Copies of a split's tensors on a device; None where "auto" chose that and they do not fit after all.

    What is free changes between the choice and the copy: by the network, and by other processes.

    Raises:
        ConfigError: when the device was asked for.
    """
    try:
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
    size = format_bytes(num_bytes({"": tensors}))
    if wanted == "device":
        raise ConfigError(
            f"`data.residency` is device, but {size} do not fit on {device}: {reason} Use data.residency=host."
        )
    log.warning("Batches from memory after all, copied ahead: %s do not fit on %s: %s", size, device, reason)
    return None


def free_memory() -> int:
    """Bytes that this process may still take, also inside a container."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if os.path.isfile(limit) and (text := Path(limit).read_text(encoding="ascii").strip()).isdigit():
            free = min(free, int(text) - int(Path(used).read_text(encoding="ascii")))
    return max(0, free)


def free_on(device: torch.device) -> int:
    """Bytes free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def num_bytes(splits: dict[str, Batch]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for split in splits.values() for tensor in split.values())


def format_bytes(count: float) -> str:
    """Bytes for people, e.g. "52.1 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# ---- memory-mapped files -----------------------------------------------------------------------------------------


def save_arrays(splits: dict[str, Batch], folder: Path) -> None:
    """Writes splits as SPLIT.NAME.npy, which `map_arrays` reads."""
    for split, tensors in splits.items():
        for name, tensor in tensors.items():
            np.save(folder / f"{split}.{name}.npy", tensor.numpy(), allow_pickle=False)


def map_arrays(folder: Path) -> dict[str, Batch]:
    """The splits in a folder as tensors whose memory is the files; what is not used stays on the disk."""
    splits: dict[str, Batch] = {}
    for path in sorted(folder.glob("*.npy")):
        split, name = path.stem.split(".", 1)
        splits.setdefault(split, {})[name] = map_array(path)
    return splits


def map_array(path: Path) -> Tensor:
    """A .npy file as a tensor. What is written to the tensor never reaches the file."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    # A file without content cannot be mapped
    return torch.from_numpy(np.load(path, mmap_mode="c" if 0 not in shape else None, allow_pickle=False))


def move_to_disk(splits: dict[str, Batch], folder: Path) -> dict[str, Batch]:
    """Writes splits into files of a folder of their own, and maps them.

    The files are removed when the process ends; `data.cache=true` keeps them.

    Raises:
        ConfigError: when there is too little space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if num_bytes(splits) > free:
        raise ConfigError(
            f"`data.residency` is mmap, but the data takes {format_bytes(num_bytes(splits))} and {folder} has "
            f"{format_bytes(free)} free. Choose another folder with paths.data=FOLDER."
        )
    with tempfile.TemporaryDirectory(prefix="mmap-", dir=folder) as temporary:
        save_arrays(splits, Path(temporary))
        return map_arrays(Path(temporary))  # the mappings keep the files' content after their names are gone
