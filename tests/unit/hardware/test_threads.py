"""The number of threads of a run, and the default that comes back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from leyden.hardware import threads
from leyden.hardware.threads import granted_threads, set_threads


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    threads._given.cache_clear()
    yield
    torch.set_num_threads(before)
    threads._given.cache_clear()


@pytest.mark.parametrize("variable", [None, "1"])
@pytest.mark.parametrize("default", [None, "auto"])
def test_default_comes_back(monkeypatch: pytest.MonkeyPatch, default: str | None, variable: str | None) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    granted = granted_threads()
    set_threads(granted + 1)
    assert torch.get_num_threads() == granted + 1
    set_threads(default)
    assert torch.get_num_threads() == granted
    assert os.environ.get("OMP_NUM_THREADS") == variable


def test_number_holds_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's launcher gives each process its share of the cores, whatever was set before."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    granted_threads()
    set_threads(3)
    _set_num_threads_if_needed(num_processes=2)
    assert torch.get_num_threads() == 3
    set_threads(None)
