"""Settings of the device: what is honoured where, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from leyden.errors import ConfigError, HardwareError
from leyden.hardware import settings
from leyden.hardware.settings import DeviceSettings


def make(**changes: Any) -> DeviceSettings:
    values = {"memory_fraction": None, "expandable_segments": None, "matmul_precision": None, "cudnn_benchmark": False}
    return DeviceSettings(**(values | changes))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    precision, allocator = torch.get_float32_matmul_precision(), torch._C._accelerator_getAllocatorSettings()
    for name in settings.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings._given.cache_clear()
    yield
    torch.set_float32_matmul_precision(precision)
    torch._C._accelerator_setAllocatorSettings(allocator or "expandable_segments:False")
    settings._given.cache_clear()
    for name in settings.ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "accelerator", "words"),
    [
        ({"memory_fraction": 0.5}, "cpu", "`hardware.memory_fraction` is 0.5, but this run is on cpu"),
        ({"memory_fraction": 0.5}, "mps", "`hardware.memory_fraction` is 0.5, but this run is on mps"),
        (
            {"expandable_segments": True},
            "cpu",
            "`hardware.expandable_segments` is true, but this run is on cpu: it is a setting of the CUDA allocator. "
            "Allowed here: null. Set hardware.expandable_segments=null, or use hardware=gpu.",
        ),
        ({"expandable_segments": False}, "mps", "`hardware.expandable_segments` is false"),
        ({"matmul_precision": "high"}, "mps", "`hardware.matmul_precision` is high, but this run is on mps"),
        (
            {"cudnn_benchmark": True},
            "cpu",
            "Allowed here: false. Set hardware.cudnn_benchmark=false, or use hardware=gpu.",
        ),
    ],
)
def test_what_a_device_cannot_honour_is_refused(changes: dict[str, Any], accelerator: str, words: str) -> None:
    with pytest.raises(HardwareError) as caught:
        make(**changes).check(accelerator)
    assert words in str(caught.value)


@pytest.mark.parametrize("accelerator", ["cpu", "mps", "gpu"])
def test_what_is_allowed(accelerator: str) -> None:
    make().check(accelerator)
    make(memory_fraction=0.5, expandable_segments=False, matmul_precision="high", cudnn_benchmark=True).check("gpu")
    make(matmul_precision="medium").check("cpu")


def test_fastest_algorithm_is_not_always_the_same_one() -> None:
    make(cudnn_benchmark=True).check_deterministic(False)
    make().check_deterministic(True)
    with pytest.raises(
        ConfigError, match=r"`hardware\.cudnn_benchmark` is true, but `engine\.deterministic` is true too"
    ):
        make(cudnn_benchmark=True).check_deterministic(True)


def test_matmul_precision_is_set_and_comes_back() -> None:
    before = torch.get_float32_matmul_precision()
    make(matmul_precision="medium").apply()
    assert torch.get_float32_matmul_precision() == "medium"
    make().apply()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
            "max_split_size_mb:128,expandable_segments:True",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128,expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4]"},
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True",
        ),
    ],
)
def test_allocator_of_this_process_and_of_those_it_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    make(expandable_segments=True).apply()
    assert os.environ["PYTORCH_ALLOC_CONF"] == expected
    assert torch._C._accelerator_getAllocatorSettings() == expected
    make().apply()  # the next run of a sweep
    assert {name: os.environ[name] for name in settings.ALLOCATOR_VARIABLES if name in os.environ} == given
    assert torch._C._accelerator_getAllocatorSettings() == next(iter(given.values()), "expandable_segments:False")


def test_allocator_is_left_alone_where_nothing_is_asked() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    make().apply()
    assert torch._C._accelerator_getAllocatorSettings() == before
    assert "PYTORCH_ALLOC_CONF" not in os.environ
