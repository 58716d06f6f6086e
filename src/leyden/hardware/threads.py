"""How many threads torch may use for one operator on the CPU."""

from __future__ import annotations

from functools import cache

import torch


@cache
def granted_threads() -> int:
    """Torch's default when this process began: the cores it may run on, or what OMP_NUM_THREADS says."""
    return torch.get_num_threads()


def set_threads(num_threads: int | str | None) -> None:
    """Sets the number of threads; what is not a number is the default, also after a run in this process set another."""
    default = granted_threads()
    torch.set_num_threads(num_threads if isinstance(num_threads, int) else default)
