"""Short measurements of a device: how fast it multiplies, copies, is copied to, and is told what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import psutil
import torch

from leyden.hardware.nvml import BFLOAT16_CAPABILITY
from leyden.hardware.peaks import peak_tflops

MEASURE_S = 0.4  # about how long all series of one measurement take together
MATMUL_SIZE = {"cpu": 1024, "mps": 4096, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "mps": 2**28, "cuda": 2**30}
FORMATS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Matmul:
    """The speed of multiplying matrices in a number format; `peak_tflops` is None where it is not known."""

    number_format: str
    size: int
    tflops: float
    peak_tflops: float | None


@dataclass(frozen=True)
class DeviceSpeed:
    """What was measured of a device; None is what it does not have.

    Attributes:
        device, name: as torch calls it, and as its maker does.
        num_threads: CPU threads of an operator, for the CPU.
        matmuls: by number format.
        copy_gb_per_s: reading and writing together, from the device's memory to the device's memory.
        pinned_gb_per_s, pageable_gb_per_s: from the host's memory to the device's.
        launch_us: how long the smallest operator takes, again and again.
        synchronise_us: how much longer where the host waits for each.
    """

    device: str
    name: str
    num_threads: int | None
    matmuls: list[Matmul]
    copy_gb_per_s: float
    pinned_gb_per_s: float | None
    pageable_gb_per_s: float | None
    launch_us: float
    synchronise_us: float | None


def synchronise(device: torch.device) -> None:
    """Waits until a device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has, on a device; of the host for the CPU and Apple's GPU, which share it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def time_calls(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that one of many calls in a row takes on a device: the median of five series, or one call that is long.

    Args:
        call: what is measured; nobody waits for it.
        device: where it computes.
    """

    def take(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronise(device)
        return time.perf_counter() - start

    take(1)  # what is prepared at the first call
    once = max(take(1), 1e-7)
    if once > MEASURE_S:
        return once
    count = max(1, int(MEASURE_S / 5 / once))
    return median(take(count) / count for _ in range(5))


def measure_device(
    device: torch.device, name: str, can_pin_memory: bool, announce: Callable[[str], None] = lambda what: None
) -> DeviceSpeed:
    """Measures a device; takes a few seconds, and at most a quarter of the memory that is free on it.

    Args:
        device: which.
        name: its maker's.
        can_pin_memory: whether the host's memory can be pinned.
        announce: told what is measured next.
    """
    matmuls = []
    for number_format in formats_of(device):
        announce(f"{name}: multiplying in {number_format}")
        matmuls.append(measure_matmul(device, name, number_format))
    announce(f"{name}: copying")
    is_cpu = device.type == "cpu"
    nothing = torch.zeros(1, device=device)
    launch_s = time_calls(lambda: nothing.add_(1), device)

    def add_and_wait() -> None:
        nothing.add_(1)
        synchronise(device)

    return DeviceSpeed(
        device=str(device),
        name=name,
        num_threads=torch.get_num_threads() if is_cpu else None,
        matmuls=matmuls,
        copy_gb_per_s=measure_copy(device),
        pinned_gb_per_s=measure_transfer(device, pinned=True) if can_pin_memory and not is_cpu else None,
        pageable_gb_per_s=None if is_cpu else measure_transfer(device, pinned=False),
        launch_us=1e6 * launch_s,
        synchronise_us=None if is_cpu else 1e6 * (time_calls(add_and_wait, device) - launch_s),
    )


def formats_of(device: torch.device) -> list[str]:
    """The number formats that a device trains in: CPUs not in float16, TensorFloat-32 only where it is in the card."""
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    without = {"tf32"} if not has_tf32 else set()
    without |= {"float16"} if device.type == "cpu" else set()
    return [name for name in FORMATS if name not in without]


def measure_matmul(device: torch.device, name: str, number_format: str) -> Matmul:
    """Multiplies square matrices in one of `FORMATS`."""
    size = MATMUL_SIZE[device.type]
    while 3 * 4 * size**2 > free_bytes(device) / 4:
        size //= 2
    with matmul_precision("high" if number_format == "tf32" else "highest"):
        left, right = (torch.randn(size, size, device=device).to(FORMATS[number_format]) for _ in range(2))
        out = torch.empty_like(left)
        seconds = time_calls(lambda: torch.mm(left, right, out=out), device)
    return Matmul(number_format, size, 2 * size**3 / seconds / 1e12, peak_tflops(name, number_format))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Multiplies float32 so exactly, inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_copy(device: torch.device) -> float:
    """Bandwidth of the device's own memory in GB/s; a copy reads and writes each byte."""
    length = min(COPY_BYTES[device.type], free_bytes(device) // 8)
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_calls(lambda: target.copy_(source), device) / 1e9


def measure_transfer(device: torch.device, pinned: bool) -> float:
    """Bandwidth from the host's memory to the device's, in GB/s."""
    length = min(2**28, free_bytes(device) // 4)
    source = torch.zeros(length, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    return source.numel() / time_calls(lambda: target.copy_(source, non_blocking=pinned), device) / 1e9
