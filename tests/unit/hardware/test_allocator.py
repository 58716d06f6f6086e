"""Memory of freed tensors stays with the process, as counted by the kernel's page faults."""

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from leyden.hardware.allocator import keep_freed_memory

done = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults_of(size, count):
    for _ in range(2):  # the C library's own rule changes after the first block
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            torch.ones(size, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(done, faults_of(48 * 2**20, 10))
"""


def run(what: str, **variables: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", CODE, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean | variables).stdout.split()
    return done[0], int(done[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_is_taken_again() -> None:
    """Ten tensors of 48 MiB are 122,880 pages of 4 KiB; glibc gives blocks above 32 MiB back each time."""
    pages = 10 * 48 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    done, faults = run("keep")
    assert done == "True"
    assert faults < pages / 100
    assert run("leave")[1] >= pages / 2  # what it is for; the kernel may give larger pages


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_settings_of_the_environment_stay() -> None:
    done, _ = run("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert done == "False"
