"""`hardware.memory_fraction` reaches the allocator of the process's own device, and is taken back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leyden.callbacks.memory_limit import MemoryLimit


def test_limit_holds_on_the_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: calls.append(arguments))
    device = torch.device("cuda", 3)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    (limit,) = MemoryLimit.of(0.5)
    limit.setup(trainer, None, "fit")  # type: ignore[arg-type]
    limit.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert calls == [(0.5, device), (1.0, device)]


def test_null_is_no_callback() -> None:
    assert MemoryLimit.of(None) == []
