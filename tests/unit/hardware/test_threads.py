"""The number of threads of a run, and the default that comes back after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from leyden.hardware.threads import granted_threads, set_threads


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("default", [None, "auto"])
def test_default_comes_back(default: str | None) -> None:
    granted = granted_threads()
    set_threads(granted + 1)
    assert torch.get_num_threads() == granted + 1
    set_threads(default)
    assert torch.get_num_threads() == granted
