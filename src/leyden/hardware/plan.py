"""Which devices a run takes, and why. The `hardware` section of the config is this function's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from leyden.errors import HardwareError
from leyden.hardware.probe import Hardware, probe_hardware

Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class HardwarePlan:
    """What the trainer is given, and the reason in words."""

    accelerator: str
    devices: int | list[int]
    strategy: str
    num_threads: int | Literal["auto"] | None
    channels_last: bool | Literal["auto"]
    reason: str

    @property
    def num_devices(self) -> int:
        """How many processes share a global batch."""
        return len(self.devices) if isinstance(self.devices, list) else self.devices

    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments for Lightning's Trainer."""
        return {"accelerator": self.accelerator, "devices": self.devices, "strategy": self.strategy}


def plan_hardware(
    accelerator: Literal["auto", "cpu", "gpu", "mps"],
    devices: Literal["auto"] | Positive | Sequence[Annotated[int, Ge(0)]],
    strategy: Literal["auto", "ddp"],
    num_threads: Positive | Literal["auto"] | None,
    channels_last: bool | Literal["auto"],
    hardware: Hardware | None = None,
) -> HardwarePlan:
    """Chooses devices for a run.

    Args:
        accelerator: "auto" takes a CUDA GPU, then Apple's GPU, then the CPU.
        devices: a count, a list of device indices, or "auto": one device, or all GPUs with strategy "ddp".
        strategy: "auto" is one process; "ddp" is data parallel, one process per device.
        num_threads: CPU threads of an operator; null leaves torch's default, "auto" measures on the CPU whether one
            thread or torch's default takes a step in less time.
        channels_last: whether convolutions keep the channels innermost in memory; "auto" does so for networks that
            have 2-D convolutions, except on Apple's GPU.
        hardware: what there is; probed when not given.

    Raises:
        HardwareError: when what is asked for is not there.
    """
    hardware = hardware or probe_hardware()
    asked = accelerator
    if accelerator == "auto":
        accelerator = "gpu" if hardware.gpus else "mps" if hardware.mps else "cpu"
    available = {"gpu": len(hardware.gpus), "mps": int(hardware.mps), "cpu": hardware.num_cores}[accelerator]
    if available == 0:
        raise HardwareError(
            f"`hardware.accelerator` is {accelerator}, but there is none here. Found: {hardware.describe()}. "
            "Use hardware=cpu, or hardware=auto to take the best there is."
        )
    chosen = _choose_devices(devices, strategy, accelerator, available)
    count = len(chosen) if isinstance(chosen, list) else chosen
    if strategy == "ddp" and accelerator == "mps":
        raise HardwareError("`hardware.strategy` ddp needs several devices; Apple's GPU is one. Use hardware=auto.")
    if strategy == "auto" and count > 1:
        raise HardwareError(
            f"`hardware.devices` asks for {count} devices, but hardware.strategy=auto is one process. "
            "Use hardware=ddp to train on several devices."
        )
    return HardwarePlan(
        accelerator={"gpu": "cuda"}.get(accelerator, accelerator),
        devices=chosen,
        strategy=strategy,
        num_threads=num_threads,
        channels_last=channels_last,
        reason=_explain(asked, accelerator, chosen, strategy, num_threads, hardware),
    )


def _choose_devices(devices: Any, strategy: str, accelerator: str, available: int) -> int | list[int]:
    if devices == "auto":
        if strategy != "ddp":
            return 1
        if available < 2:
            raise HardwareError(
                f"`hardware.strategy` ddp needs at least 2 devices, but there is {available} {accelerator} here. "
                "Use hardware=auto for one device."
            )
        return available
    if isinstance(devices, int):
        if devices > available and accelerator != "cpu":  # processes may share a core
            raise HardwareError(
                f"`hardware.devices` must be between 1 and {available} for {accelerator} on this machine, got "
                f"{devices}. Use hardware.devices=auto."
            )
        return devices
    indices = list(devices)
    if accelerator == "cpu":
        raise HardwareError("`hardware.devices` is a list of indices, but CPUs have none. Give a number.")
    wrong = [index for index in indices if index >= available]
    if wrong or not indices or len(set(indices)) < len(indices):
        raise HardwareError(
            f"`hardware.devices` must be a list of different indices out of {list(range(available))}, got {indices}."
        )
    return indices


def _explain(
    asked: str, accelerator: str, devices: Any, strategy: str, num_threads: int | str | None, hardware: Hardware
) -> str:
    if accelerator == "gpu":
        indices = devices if isinstance(devices, list) else list(range(devices))
        what = ", ".join(f"GPU {index} {hardware.gpus[index]}" for index in indices)
        idle = len(hardware.gpus) - len(indices)
        why = "asked for" if asked != "auto" else "the first CUDA device found"
        more = f"; {idle} more GPU(s) idle, hardware=ddp uses all" if idle and strategy == "auto" else ""
    elif accelerator == "mps":
        what, more = "Apple GPU (mps)", ""
        why = "asked for" if asked != "auto" else "no CUDA device here"
    else:
        threads = f", {num_threads} thread(s) per operator" if isinstance(num_threads, int) else ""
        what, more = f"CPU {hardware.cpu} ({hardware.num_cores} cores{threads})", ""
        why = "asked for" if asked != "auto" else "no CUDA or Apple GPU found"
    processes = "" if strategy == "auto" else f" by {strategy} in {_count(devices)} processes"
    return f"{what}{processes} ({why}{more})"


def _count(devices: int | list[int]) -> int:
    return len(devices) if isinstance(devices, list) else devices
