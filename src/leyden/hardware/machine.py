"""The processor and the memory of this machine, and what of them this process is granted.

Read from /proc and /sys, so that nothing is started; where these are not there (macOS), psutil says what it can.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """What is not an accelerator. None is what the system does not say, or a limit that is not set.

    Attributes:
        cpu: the processor's name.
        num_cores: logical cores that this process is granted, at least 1: the smaller of affinity and whole cores of
            the control group's quota.
        num_cores_total: logical cores of the machine.
        cpu_quota: cores' worth of time that the control group grants, e.g. 1.5.
        memory_total_bytes: of the machine.
        memory_available_bytes: what can be had without swapping; of the machine, whatever the control group grants.
        memory_limit_bytes: of the control group.
        numa_nodes: for each memory node its cores, e.g. "0-15".
    """

    cpu: str
    num_cores: int
    num_cores_total: int
    cpu_quota: float | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    memory_limit_bytes: int | None
    numa_nodes: tuple[str, ...]


def read_machine(root: Path = Path("/")) -> Machine:
    """Reads what this machine has and grants.

    Args:
        root: the folder that holds proc/ and sys/.
    """
    total, available = _read_memory(root)
    num_total = sum(line.startswith("processor") for line in _lines(root / "proc/cpuinfo")) or os.cpu_count() or 1
    quota = _read_quota(root)
    allowed = _read_affinity(root) or num_total
    return Machine(
        cpu=_read_cpu_name(root),
        num_cores=max(1, min(allowed, int(quota) if quota is not None else allowed)),
        num_cores_total=num_total,
        cpu_quota=quota,
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_limit_bytes=_read_memory_limit(root, total),
        numa_nodes=tuple((node / "cpulist").read_text(encoding="ascii").strip() for node in _numa_nodes(root)),
    )


def _numa_nodes(root: Path) -> list[Path]:
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sorted(nodes, key=lambda path: int(path.name.removeprefix("node")))


def _lines(path: Path) -> list[str]:
    """The lines of a file, none where it is not there or must not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_cpu_name(root: Path) -> str:
    names = (line.split(":", 1)[1].strip() for line in _lines(root / "proc/cpuinfo") if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _read_affinity(root: Path) -> int | None:
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Cpus_allowed_list:"):
            return count_list(line.split(":", 1)[1].strip())
    return None


def count_list(text: str) -> int:
    """How many numbers a list in the kernel's form has: "0-3,8" has 5."""
    ends = [part.split("-") for part in text.split(",") if part]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _read_memory(root: Path) -> tuple[int | None, int | None]:
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in _lines(root / "proc/meminfo"))}
    found = [int(sizes[name][0]) * 1024 if name in sizes else None for name in ("MemTotal", "MemAvailable")]
    if found == [None, None] and root == Path("/"):
        memory = psutil.virtual_memory()
        return memory.total, memory.available
    return found[0], found[1]


# ---- control groups ----------------------------------------------------------------------------------------------


def _read_quota(root: Path) -> float | None:
    """The smallest quota of this process's control group and those above it, in cores."""
    quotas = []
    for folder in control_groups(root, ""):
        limit, _, period = next(iter(_lines(folder / "cpu.max")), "max").partition(" ")
        if limit != "max":
            quotas.append(int(limit) / int(period))
    for folder in control_groups(root, "cpu"):
        limit = next(iter(_lines(folder / "cpu.cfs_quota_us")), "-1")
        if int(limit) > 0:
            quotas.append(int(limit) / int(_lines(folder / "cpu.cfs_period_us")[0]))
    return min(quotas, default=None)


def _read_memory_limit(root: Path, total: int | None) -> int | None:
    """The smallest limit; version 1 says "none" by a number beyond all memory."""
    places = [(group, "memory.max") for group in control_groups(root, "")]
    places += [(group, "memory.limit_in_bytes") for group in control_groups(root, "memory")]
    texts = [text for group, name in places for text in _lines(group / name)[:1] if text != "max"]
    limits = [int(text) for text in texts if total is None or int(text) < total]
    return min(limits, default=None)


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those above it that can be seen, innermost first.

    Args:
        root: the folder that holds proc/ and sys/.
        controller: of version 1, e.g. "memory"; "" is version 2.

    Source: https://man7.org/linux/man-pages/man7/cgroups.7.html
    """
    memberships: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        memberships |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", 2)
        mounted = {"cgroup2": [""], "cgroup": options.split(",")}.get(kind, [])
        if controller not in mounted or controller not in memberships:
            continue
        mount_root, mount_point = place.split()[3:5]
        top = root / mount_point.lstrip("/")
        inside = memberships[controller].removeprefix(mount_root if mount_root != "/" else "").strip("/")
        folder = top / inside
        if not folder.is_dir():  # a container sees its own group as the top, under the name that the host gave it
            folder = top
        while True:
            yield folder
            if folder == top:
                return
            folder = folder.parent
