"""What NVIDIA's management library (NVML) says of the cards, without starting CUDA on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

# A card with more than this in use belongs to somebody. The driver's own share and a screen stay below it.
BUSY_MEMORY_FRAC = 0.1
BUSY_UTILISATION_FRAC = 0.1
BFLOAT16_CAPABILITY = (8, 0)  # Ampere, which has TensorFloat-32 too


@dataclass(frozen=True)
class Gpu:
    """A card, or a MIG slice of one. None is what NVML does not say of it.

    Attributes:
        name: the exact name, as in the tables of `peaks`.
        uuid: what CUDA_VISIBLE_DEVICES can name it by.
        memory_total_bytes, memory_free_bytes: all processes count.
        utilisation_frac: share of the last moment in which a kernel ran; not known of MIG slices.
        capability: CUDA's compute capability.
        compute_mode: "exclusive" takes one process at a time, "prohibited" takes none.
        num_processes: that compute on it.
        driver_problem: why its driver cannot work with this torch.
    """

    name: str
    uuid: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilisation_frac: float | None = None
    capability: tuple[int, int] | None = None
    compute_mode: Literal["default", "exclusive", "prohibited"] | None = None
    num_processes: int | None = None
    driver_problem: str | None = None

    @property
    def has_bfloat16(self) -> bool | None:
        """Whether tensor cores multiply bfloat16."""
        return None if self.capability is None else self.capability >= BFLOAT16_CAPABILITY

    @property
    def refusal(self) -> str | None:
        """Why no process can be started on it; None where one can."""
        if self.driver_problem is not None:
            return self.driver_problem
        if self.compute_mode == "prohibited":
            return "its compute mode is prohibited"
        if self.compute_mode == "exclusive" and self.num_processes:
            return "its compute mode is exclusive, and another process has it"
        return None

    @property
    def occupation(self) -> str | None:
        """Why it counts as busy, in words; None where it is idle or nothing is known."""
        if self.refusal is not None:
            return self.refusal
        found = []
        if self.memory_total_bytes and self.memory_free_bytes is not None:
            used = self.memory_total_bytes - self.memory_free_bytes
            if used > BUSY_MEMORY_FRAC * self.memory_total_bytes:
                found.append(f"{used / 2**30:.1f} of {self.memory_total_bytes / 2**30:.1f} GiB in use")
        if self.utilisation_frac is not None and self.utilisation_frac > BUSY_UTILISATION_FRAC:
            found.append(f"computing {self.utilisation_frac:.0%} of the time")
        return ", ".join(found) or None


@dataclass(frozen=True)
class Links:
    """How a card is connected, and how it is divided. None is what NVML does not say.

    Attributes:
        pcie_generation, pcie_width: the largest that card and slot have together.
        num_nvlinks: active links to other cards or switches.
        mig_enabled: whether the card is divided into MIG slices.
    """

    pcie_generation: int | None
    pcie_width: int | None
    num_nvlinks: int
    mig_enabled: bool | None


@contextmanager
def opened(nvml: Any | None = None) -> Iterator[Any | None]:
    """The library, ready to be asked; None where there is no NVIDIA driver.

    Args:
        nvml: a module with the functions of nvidia-ml-py; None takes that one.
    """
    import pynvml

    library: Any = nvml or pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def ask(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """The answer to one question; None where the card or the driver does not know it."""
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


def visible_handles(nvml: Any, environment: Mapping[str, str]) -> list[Any] | None:
    """NVML's handles of the devices that CUDA shows, in CUDA's order; None where the two cannot be matched.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars: CUDA_VISIBLE_DEVICES ends at the first
    entry that names no device, and CUDA counts as NVML does only if CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    by_number = names is None or all(name.lstrip("-").isdigit() for name in names)
    if by_number and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(handles) > 1:
        return None
    if names is None:
        found = handles
    else:
        found = []
        for name in names:
            handle = _handle_of(nvml, handles, name)
            if handle is None:
                break
            found.append(handle)
        if len({nvml.nvmlDeviceGetUUID(handle) for handle in found}) < len(found):
            return []  # CUDA shows nothing where one is named twice
    # Of a divided card CUDA shows a slice, which only its own name tells
    divided = any((ask(nvml, "nvmlDeviceGetMigMode", handle) or (0, 0))[0] for handle in found)
    return None if divided else found


def _handle_of(nvml: Any, handles: list[Any], name: str) -> Any | None:
    if name.isdigit():
        return handles[int(name)] if int(name) < len(handles) else None
    if name.startswith("MIG-"):
        return ask(nvml, "nvmlDeviceGetHandleByUUID", name)
    matches = [handle for handle in handles if name and nvml.nvmlDeviceGetUUID(handle).startswith(name)]
    return matches[0] if len(matches) == 1 else None


def find_driver_problem(nvml: Any, built_for: str | None) -> str | None:
    """Why the driver cannot work with a torch that was built for a version of CUDA; None where it can, or may.

    A driver takes programs of its own major version of CUDA, and of older ones.
    Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    version = ask(nvml, "nvmlSystemGetCudaDriverVersion")
    if version is None or built_for is None or version // 1000 >= int(built_for.partition(".")[0]):
        return None
    return (
        f"its driver (for CUDA {version // 1000}.{version % 1000 // 10}) is too old for this torch, which was built "
        f"for CUDA {built_for}: update the driver, or install a torch for an older CUDA"
    )


def read_gpu(nvml: Any, handle: Any, driver_problem: str | None = None) -> Gpu:
    """One device."""
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    processes = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    modes: dict[int | None, Literal["default", "exclusive", "prohibited"]] = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "default",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=ask(nvml, "nvmlDeviceGetUUID", handle),
        memory_total_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.free,
        utilisation_frac=None if rates is None else rates.gpu / 100,
        capability=None if capability is None else (capability[0], capability[1]),
        compute_mode=modes.get(ask(nvml, "nvmlDeviceGetComputeMode", handle)),
        num_processes=None if processes is None else len(processes),
        driver_problem=driver_problem,
    )


def read_links(nvml: Any, handle: Any) -> Links:
    """One card's connections."""
    states = [ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    mig = ask(nvml, "nvmlDeviceGetMigMode", handle)
    return Links(
        pcie_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        num_nvlinks=sum(state == 1 for state in states),
        mig_enabled=None if mig is None else bool(mig[0]),
    )
