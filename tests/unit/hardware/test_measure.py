"""The measurements measure what they say, and invent nothing."""

from __future__ import annotations

import time

import pytest
import torch

from leyden.hardware import measure
from leyden.hardware.measure import measure_device, measure_matmul, time_calls
from leyden.hardware.peaks import PEAK_TFLOPS, peak_tflops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(measure, "COPY_BYTES", {"cpu": 2**16})


def test_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.1)
    # Sleeping takes no less than asked; on a busy machine it may take more
    assert 0.01 <= time_calls(lambda: time.sleep(0.01), CPU) < 0.1


def test_long_call_is_made_twice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.01)
    calls = []
    seconds = time_calls(lambda: (calls.append(1), time.sleep(0.02)), CPU)
    assert len(calls) == 2
    assert seconds >= 0.02


def test_flops_are_two_for_each_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_calls", lambda call, device: 2e-6)
    found = measure_matmul(CPU, "Xeon", "float32")
    # 2 * 64^3 operations in 2 us are 0.262144 TFLOP/s
    assert found.tflops == pytest.approx(0.262144)
    assert found.peak_tflops is None


def test_device_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.01)
    told: list[str] = []
    before = torch.get_float32_matmul_precision()
    found = measure_device(CPU, "Xeon", False, told.append)
    assert [matmul.number_format for matmul in found.matmuls] == ["float32", "bfloat16"]
    assert found.num_threads == torch.get_num_threads()
    assert found.copy_gb_per_s > 0
    assert found.launch_us > 0
    assert (found.pinned_gb_per_s, found.pageable_gb_per_s, found.synchronise_us) == (None, None, None)
    assert told
    assert torch.get_float32_matmul_precision() == before


def test_small_devices_are_measured_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.01)
    # Three matrices of 32 x 32 in float32 are 12,288 bytes, a quarter of 49,152; of 64 x 64 they are four times that
    monkeypatch.setattr(measure, "free_bytes", lambda device: 49_152)
    assert measure_matmul(CPU, "Xeon", "float32").size == 32


def test_peaks_are_dense() -> None:
    for name, peaks in PEAK_TFLOPS.items():
        assert peaks["float16"] < 1000, name  # Hopper's 1,979 is with sparsity
        if "tf32" in peaks:
            assert peaks["tf32"] == pytest.approx(peaks["float16"] / 2, rel=0.02), name
    assert peak_tflops("NVIDIA H200", "bfloat16") == 989.4
    assert peak_tflops("Tesla T4", "bfloat16") is None
    assert peak_tflops("NVIDIA H200 of another kind", "float32") is None
