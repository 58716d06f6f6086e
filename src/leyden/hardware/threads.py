"""How many threads torch may use for one operator on the CPU."""

from __future__ import annotations

import os
from functools import cache

import torch

VARIABLE = "OMP_NUM_THREADS"


@cache
def _given() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get(VARIABLE)


def granted_threads() -> int:
    """Torch's default when this process began: the cores it may run on, or what OMP_NUM_THREADS says."""
    return _given()[0]


def set_threads(num_threads: int | str | None) -> None:
    """Sets the number of threads; what is not a number is the default, also after a run in this process set another.

    The environment says it too: where it says nothing, Lightning sets a number of its own for several processes.
    """
    default, variable = _given()
    if isinstance(num_threads, int):
        default, variable = num_threads, str(num_threads)
    torch.set_num_threads(default)
    os.environ.pop(VARIABLE, None)
    if variable is not None:
        os.environ[VARIABLE] = variable
