"""What hardware is there. The only place that asks torch for accelerators."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """What this machine offers.

    Attributes:
        gpus: names of the visible CUDA devices, by index.
        mps: whether Apple's GPU can be used.
        cpu: the processor's name.
        num_cores: cores this process may use.
    """

    gpus: tuple[str, ...]
    mps: bool
    cpu: str
    num_cores: int

    def describe(self) -> str:
        """One line for messages."""
        found = [f"GPU {index} {name}" for index, name in enumerate(self.gpus)]
        found += ["Apple GPU (mps)"] if self.mps else []
        return ", ".join([*found, f"CPU {self.cpu} ({self.num_cores} cores)"])


def probe_hardware() -> Hardware:
    """Looks at this machine without initialising a device."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Hardware(
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        mps=torch.backends.mps.is_available(),
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except FileNotFoundError:  # not Linux
        return platform.processor() or platform.machine()
