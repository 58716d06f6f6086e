"""Which devices a run takes, and why. The `hardware` section of the config is this function's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from leyden.errors import HardwareError
from leyden.hardware.probe import Hardware, probe_hardware

Positive = Annotated[int, Ge(1)]

# Strategies whose processes hold parts of the network
SHARDED = ("fsdp", "tensor_parallel", "fsdp_tensor_parallel")


@dataclass(frozen=True)
class HardwarePlan:
    """What the trainer is given, and the reason in words."""

    accelerator: str
    devices: int | list[int]
    strategy: str
    num_threads: int | Literal["auto"] | None
    channels_last: bool | Literal["auto"]
    reason: str
    tensor_parallel_size: int = 1

    @property
    def num_devices(self) -> int:
        """How many processes there are."""
        return len(self.devices) if isinstance(self.devices, list) else self.devices

    @property
    def data_parallel_size(self) -> int:
        """How many parts a global batch is cut into."""
        return self.num_devices // self.tensor_parallel_size

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the network."""
        return self.strategy in SHARDED

    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments for Lightning's Trainer."""
        return {"accelerator": self.accelerator, "devices": self.devices, "strategy": self.strategy}


def plan_hardware(
    accelerator: Literal["auto", "cpu", "gpu", "mps"],
    devices: Literal["auto"] | Positive | Sequence[Annotated[int, Ge(0)]],
    strategy: Literal["auto", "ddp", "fsdp", "tensor_parallel", "fsdp_tensor_parallel"],
    num_threads: Positive | Literal["auto"] | None,
    channels_last: bool | Literal["auto"],
    tensor_parallel_size: Positive | None = None,
    hardware: Hardware | None = None,
) -> HardwarePlan:
    """Chooses devices for a run.

    Args:
        accelerator: "auto" takes a CUDA GPU, then Apple's GPU, then the CPU.
        devices: a count, a list of device indices, or "auto": one device, or all GPUs with any strategy but "auto".
        strategy: "auto" is one process, all others one process per device. "ddp" is data parallel; "fsdp" too, but each
            process holds a part of the weights and of the optimiser's state; "tensor_parallel" cuts the layers
            themselves, and all processes take the same samples; "fsdp_tensor_parallel" is both.
        num_threads: CPU threads of an operator; null leaves torch's default, "auto" measures on the CPU whether one
            thread or torch's default takes a step in less time.
        channels_last: whether convolutions keep the channels innermost in memory; "auto" does so for networks that
            have 2-D convolutions, except on Apple's GPU and where processes hold parts of the network.
        tensor_parallel_size: processes that share a layer, for "fsdp_tensor_parallel"; null where the strategy says it.
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
    if strategy != "auto" and accelerator == "mps":
        raise HardwareError(
            f"`hardware.strategy` {strategy} needs several devices; Apple's GPU is one. Use hardware=auto."
        )
    if strategy == "auto" and count > 1:
        raise HardwareError(
            f"`hardware.devices` asks for {count} devices, but hardware.strategy=auto is one process. "
            "Use hardware=ddp to train on several devices."
        )
    tensor_parallel_size = _choose_tensor_parallel_size(strategy, count, tensor_parallel_size)
    if strategy in SHARDED:
        _check_sharded(strategy, count, num_threads, channels_last)
        channels_last = False  # torch's fully_shard takes weights in their plain layout only (2.14)
    reason = _explain(asked, accelerator, chosen, strategy, num_threads, hardware)
    if strategy == "fsdp_tensor_parallel":
        reason += f", {count // tensor_parallel_size} x {tensor_parallel_size} (data x tensor parallel)"
    return HardwarePlan(
        accelerator={"gpu": "cuda"}.get(accelerator, accelerator),
        devices=chosen,
        strategy=strategy,
        num_threads=num_threads,
        channels_last=channels_last,
        reason=reason,
        tensor_parallel_size=tensor_parallel_size,
    )


def _choose_tensor_parallel_size(strategy: str, count: int, asked: int | None) -> int:
    if strategy != "fsdp_tensor_parallel":
        size = count if strategy == "tensor_parallel" else 1
        if asked not in (None, size):
            raise HardwareError(
                f"`hardware.tensor_parallel_size` is {asked}, but with hardware.strategy={strategy} on {count} "
                f"device(s) it is {size}. Set it to null, or use hardware=fsdp_tensor_parallel."
            )
        return size
    if asked is None or asked < 2 or count % asked or count == asked:
        allowed = [size for size in range(2, count) if count % size == 0]
        raise HardwareError(
            f"`hardware.tensor_parallel_size` must share the {count} device(s) evenly with at least 2 in each "
            f"direction, got {'null' if asked is None else asked}. "
            + (f"Allowed: {allowed}." if allowed else "Use 4 devices or more, or hardware=fsdp.")
        )
    return asked


def _check_sharded(strategy: str, count: int, num_threads: Any, channels_last: Any) -> None:
    if count < 2:
        raise HardwareError(
            f"`hardware.strategy` {strategy} needs at least 2 devices, but hardware.devices is {count}. "
            "Use hardware=auto for one device."
        )
    if num_threads == "auto":
        raise HardwareError(
            f"`hardware.num_threads` is auto, which measures steps of one process; those of "
            f"hardware.strategy={strategy} need all. Give a number, or null for torch's default."
        )
    if channels_last is True:
        raise HardwareError(
            f"`hardware.channels_last` is true, which hardware.strategy={strategy} does not have. Use "
            "hardware.channels_last=auto."
        )


def _choose_devices(devices: Any, strategy: str, accelerator: str, available: int) -> int | list[int]:
    if devices == "auto":
        if strategy == "auto":
            return 1
        if available < 2:
            raise HardwareError(
                f"`hardware.strategy` {strategy} needs at least 2 devices, but there is {available} {accelerator} "
                "here. Use hardware=auto for one device."
            )
        return available
    if isinstance(devices, int):
        if devices > available:
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
