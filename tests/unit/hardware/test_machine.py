"""The processor and memory of made-up machines, from trees of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from leyden.hardware.machine import Machine, control_groups, count_list, read_machine

MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1000 kB\nMemAvailable:   32768000 kB\n"
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def machine(root: Path, affinity: str = "0-15", **files: str) -> Path:
    """16 cores of two memory nodes, 62.5 GiB."""
    cores = "".join(f"processor\t: {core}\nmodel name\t: Xeon 8481C\n\n" for core in range(16))
    return write(
        root,
        {
            "proc/cpuinfo": cores,
            "proc/meminfo": MEMINFO,
            "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{affinity}\n",
            "sys/devices/system/node/node0/cpulist": "0-7\n",
            "sys/devices/system/node/node1/cpulist": "8-15\n",
            "sys/devices/system/node/node10/cpulist": "\n",
            **files,
        },
    )


def test_whole_machine(tmp_path: Path) -> None:
    assert read_machine(machine(tmp_path)) == Machine(
        cpu="Xeon 8481C",
        num_cores=16,
        num_cores_total=16,
        cpu_quota=None,
        memory_total_bytes=65536000 * 1024,
        memory_available_bytes=32768000 * 1024,
        memory_limit_bytes=None,
        numa_nodes=("0-7", "8-15", ""),  # by number, not by name
    )


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-3", 4), ("0-3,8", 5), ("1,3,5-6", 4)])
def test_lists_of_the_kernel(text: str, count: int) -> None:
    assert count_list(text) == count


def test_affinity_limits_the_cores(tmp_path: Path) -> None:
    found = read_machine(machine(tmp_path, affinity="0-3,8"))
    assert (found.num_cores, found.num_cores_total) == (5, 16)


@pytest.mark.parametrize(
    ("cpu_max", "quota", "cores"),
    [
        ("400000 100000", 4.0, 4),
        ("250000 100000", 2.5, 2),  # whole cores: a third process would wait
        ("50000 100000", 0.5, 1),
        ("max 100000", None, 16),
        ("3200000 100000", 32.0, 16),  # more than there is
    ],
)
def test_quota_of_version_2(tmp_path: Path, cpu_max: str, quota: float | None, cores: int) -> None:
    root = write(
        machine(tmp_path),
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/user.slice/job/cpu.max": cpu_max,
        },
    )
    found = read_machine(root)
    assert (found.cpu_quota, found.num_cores) == (quota, cores)


def test_smallest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    root = write(
        machine(tmp_path),
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
            "sys/fs/cgroup/a/memory.max": str(8 * 2**30),
        },
    )
    found = read_machine(root)
    assert (found.num_cores, found.memory_limit_bytes) == (2, 8 * 2**30)


@pytest.mark.parametrize(
    ("quota", "limit", "cores", "bytes_"),
    [("300000", str(4 * 2**30), 3, 4 * 2**30), ("-1", "9223372036854771712", 16, None)],
)
def test_version_1(tmp_path: Path, quota: str, limit: str, cores: int, bytes_: int | None) -> None:
    root = write(
        machine(tmp_path),
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            "proc/self/mountinfo": V1,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": limit,
        },
    )
    found = read_machine(root)
    assert (found.num_cores, found.memory_limit_bytes) == (cores, bytes_)


def test_container_that_is_told_the_hosts_name_of_its_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/docker-1f.scope\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/cpu.max": "100000 100000",
        },
    )
    assert list(control_groups(root, "")) == [root / "sys/fs/cgroup"]
    assert read_machine(root).cpu_quota == 1.0


def test_container_with_a_part_of_the_tree_mounted(tmp_path: Path) -> None:
    mount = "35 31 0:32 /docker/1f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/1f/inner\n",
            "proc/self/mountinfo": mount,
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": "1",
        },
    )
    top = root / "sys/fs/cgroup/memory"
    assert list(control_groups(root, "memory")) == [top / "inner", top]


def test_empty_tree_is_unknown_and_not_invented(tmp_path: Path) -> None:
    found = read_machine(tmp_path)
    assert found.memory_total_bytes is None
    assert found.memory_available_bytes is None
    assert found.memory_limit_bytes is None
    assert found.cpu_quota is None
    assert found.numa_nodes == ()
    assert found.num_cores == os.cpu_count()


def test_this_machine_agrees_with_psutil() -> None:
    found = read_machine()
    assert found.memory_total_bytes == psutil.virtual_memory().total
    assert found.num_cores_total == psutil.cpu_count()
    if hasattr(os, "sched_getaffinity") and found.cpu_quota is None:
        assert found.num_cores == len(os.sched_getaffinity(0))
