"""What hardware is there. The only place that asks torch for accelerators."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.hardware.machine import Machine, read_machine
from leyden.hardware.nvml import Gpu, Links, find_driver_problem, opened, read_gpu, read_links, visible_handles

# Variables that change what a process sees of the accelerators, or how it uses them
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_PIPE_DIRECTORY",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Hardware:
    """What this machine offers.

    Attributes:
        gpus: names of the visible CUDA devices, by index.
        mps: whether Apple's GPU can be used.
        cpu: the processor's name.
        num_cores: cores this process may use.
        states: what NVIDIA's library says of each of `gpus`; empty where it says nothing, or not of which it speaks.
    """

    gpus: tuple[str, ...]
    mps: bool
    cpu: str
    num_cores: int
    states: tuple[Gpu, ...] = ()

    def describe(self) -> str:
        """One line for messages."""
        found = [f"GPU {index} {name}" for index, name in enumerate(self.gpus)]
        found += ["Apple GPU (mps)"] if self.mps else []
        return ", ".join([*found, f"CPU {self.cpu} ({self.num_cores} cores)"])

    def occupation(self, index: int) -> str | None:
        """Why a GPU counts as busy, in words; None where it is idle or that is not known."""
        return self.states[index].occupation if self.states else None

    @property
    def idle_gpus(self) -> list[int]:
        """Indices of the GPUs that are not known to be busy."""
        return [index for index in range(len(self.gpus)) if self.occupation(index) is None]

    @property
    def busy_gpus(self) -> str:
        """The busy GPUs and why, in words."""
        busy = [index for index in range(len(self.gpus)) if index not in self.idle_gpus]
        return ", ".join(f"GPU {index} is busy ({self.occupation(index)})" for index in busy)


@dataclass(frozen=True)
class Survey:
    """Everything that is known of a machine; None is what is not known.

    Attributes:
        hardware, machine: as `probe_hardware` and `read_machine` give them.
        links: of each of `hardware.gpus`; empty where NVIDIA's library does not say.
        driver, driver_cuda: version of NVIDIA's driver, and the newest CUDA that it knows.
        torch, torch_cuda, cudnn: versions of torch, and of what it was built with.
        mps_server: whether CUDA's multi-process service takes this process's work.
        can_pin_memory: whether memory can be pinned, so that copies to a GPU run beside computing.
        environment: the variables that matter and are set.
    """

    hardware: Hardware
    machine: Machine
    links: tuple[Links, ...]
    driver: str | None
    driver_cuda: str | None
    torch: str
    torch_cuda: str | None
    cudnn: str | None
    mps_server: bool
    can_pin_memory: bool
    environment: dict[str, str]


def probe_hardware(root: Path = Path("/"), nvml: Any | None = None) -> Hardware:
    """Looks at this machine without starting a device; takes a few milliseconds.

    Args:
        root: the folder that holds proc/ and sys/.
        nvml: a module with the functions of nvidia-ml-py; None takes that one.
    """
    import torch

    machine = read_machine(root)
    count = torch.cuda.device_count()
    states = _read_states(count, nvml, os.environ) if count else ()
    # Where NVIDIA's library does not say it, torch does, which starts CUDA
    names = tuple(state.name for state in states) or tuple(map(torch.cuda.get_device_name, range(count)))
    return Hardware(names, torch.backends.mps.is_available(), machine.cpu, machine.num_cores, states)


def _read_states(count: int, nvml: Any | None, environment: MutableMapping[str, str]) -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_initialized():
        # Then an index means the same to CUDA, to NVIDIA's library and in nvidia-smi
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with opened(nvml) as library:
        handles = visible_handles(library, environment) if library else None
        if handles is None or len(handles) != count:
            return ()
        problem = find_driver_problem(library, torch.version.cuda)
        return tuple(read_gpu(library, handle, problem) for handle in handles)


def survey_hardware(root: Path = Path("/"), nvml: Any | None = None) -> Survey:
    """Looks closely, for people who want to know; starts CUDA where there is one."""
    import torch

    hardware = probe_hardware(root, nvml)
    links: tuple[Links, ...] = ()
    driver = driver_cuda = None
    if hardware.gpus:
        with opened(nvml) as library:
            if library is not None:
                driver = library.nvmlSystemGetDriverVersion()
                version = library.nvmlSystemGetCudaDriverVersion()
                driver_cuda = f"{version // 1000}.{version % 1000 // 10}"
                handles = visible_handles(library, os.environ) if hardware.states else None
                links = tuple(read_links(library, handle) for handle in handles or ())
    pipe = root / os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps").lstrip("/") / "control"
    cudnn = torch.backends.cudnn.version() if hardware.gpus else None
    return Survey(
        hardware=hardware,
        machine=read_machine(root),
        links=links,
        driver=driver,
        driver_cuda=driver_cuda,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        mps_server=bool(hardware.gpus) and pipe.exists(),
        can_pin_memory=bool(hardware.gpus) and _can_pin(),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _can_pin() -> bool:
    import torch

    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:  # the system lets this process lock no memory
        return False
