"""How the C library hands out and takes back the memory of tensors on the CPU."""

from __future__ import annotations

import ctypes
import os
import platform

# Numbers and defaults: mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")

LARGEST_KEPT = 128 * 2**20
KEPT_IN_ALL = 512 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process keep the memory of freed tensors for the next ones.

    As it comes, glibc gives large blocks back to the system when they are freed, and the system clears each page when
    the next step asks for it again. Does nothing with another C library, and where the environment has settings of its
    own or another allocator. The largest amount of memory that a run takes stays the same.

    Returns:
        whether it did.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_IN_ALL))
