"""Which devices a run takes, and why. The `hardware` section of the config is this function's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from leyden.errors import HardwareError
from leyden.hardware.probe import Hardware
from leyden.hardware.settings import DeviceSettings, Fraction, MatmulPrecision

Positive = Annotated[int, Ge(1)]

StrategyName = Literal["auto", "ddp", "fsdp", "tensor_parallel", "fsdp_tensor_parallel"]
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
    settings: DeviceSettings
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

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether BatchNorm takes its statistics over all processes: torch's SyncBatchNorm, which needs CUDA GPUs."""
        return self.strategy == "ddp" and self.accelerator == "cuda"

    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments for Lightning's Trainer."""
        return {"accelerator": self.accelerator, "devices": self.devices, "strategy": self.strategy}


def plan_hardware(
    hardware: Hardware,
    /,
    accelerator: Literal["auto", "cpu", "gpu", "mps"],
    devices: Literal["auto", "idle"] | Positive | list[Annotated[int, Ge(0)]],
    strategy: StrategyName,
    tensor_parallel_size: Positive | None,
    num_threads: Positive | Literal["auto"] | None,
    channels_last: bool | Literal["auto"],
    memory_fraction: Fraction | None,
    expandable_segments: bool | None,
    matmul_precision: MatmulPrecision | None,
    cudnn_benchmark: bool,
) -> HardwarePlan:
    """Chooses devices for a run.

    Args:
        hardware: what there is; the other arguments are the config's.
        accelerator: "auto" takes a CUDA GPU, then Apple's GPU, then the CPU.
        devices: a count, a list of device indices, "auto": one device, or all GPUs with any strategy but "auto", or
            "idle": all idle GPUs, by "ddp" where there are several; one device where there is no GPU. A GPU is busy
            where a tenth of its memory is in use or it computes. One GPU or a count of them are idle ones, as far as
            there are.
        strategy: "auto" is one process, all others one process per device. "ddp" is data parallel; "fsdp" too, but each
            process holds a part of the weights and of the optimiser's state; "tensor_parallel" cuts the layers
            themselves, and all processes take the same samples; "fsdp_tensor_parallel" is both.
        tensor_parallel_size: processes that share a layer, for "fsdp_tensor_parallel"; null where the strategy says it.
        num_threads: CPU threads of an operator; null leaves torch's default, "auto" measures on the CPU whether one
            thread or torch's default takes a step in less time.
        channels_last: whether convolutions keep the channels innermost in memory; "auto" does so for networks that
            have 2-D convolutions, except on Apple's GPU and where processes hold parts of the network.
        memory_fraction: largest share of a CUDA GPU's memory that torch takes; null is all.
        expandable_segments: whether CUDA memory grows in place, which leaves fewer gaps; null leaves it to torch.
        matmul_precision: how exactly float32 is multiplied: "highest", or by tensor cores "high" (TensorFloat-32) or
            "medium" (bfloat16); null leaves it to torch.
        cudnn_benchmark: whether cuDNN tries its algorithms on each new shape and takes the fastest.

    Raises:
        HardwareError: when what is asked for is not there, or a setting is not for it.
    """
    asked = accelerator
    if accelerator == "auto":
        accelerator = "gpu" if hardware.gpus else "mps" if hardware.mps else "cpu"
    available = {"gpu": len(hardware.gpus), "mps": int(hardware.mps), "cpu": hardware.num_cores}[accelerator]
    if available == 0:
        raise HardwareError(
            f"`hardware.accelerator` is {accelerator}, but there is none here. Found: {hardware.describe()}. "
            "Use hardware=cpu, or hardware=auto to take the best there is."
        )
    settings = DeviceSettings(memory_fraction, expandable_segments, matmul_precision, cudnn_benchmark)
    settings.check(accelerator)
    if devices == "idle":
        devices, strategy = _choose_idle(strategy, accelerator, hardware)
    chosen = _choose_devices(devices, strategy, accelerator, available)
    if accelerator == "gpu":
        chosen = _prefer_idle(chosen, hardware)
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
        tensor_parallel_size=tensor_parallel_size,
        settings=settings,
        reason=reason,
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
            f"`hardware.devices` must be a list of different indices out of {list(range(available))}, got {indices}. "
            "Use hardware.devices=auto."
        )
    return indices


def _choose_idle(strategy: StrategyName, accelerator: str, hardware: Hardware) -> tuple[Any, StrategyName]:
    """The idle GPUs where there are several, otherwise what "auto" is."""
    if accelerator != "gpu" or len(hardware.idle_gpus) < 2:
        return "auto", strategy
    return hardware.idle_gpus, "ddp" if strategy == "auto" else strategy


def _prefer_idle(chosen: int | list[int], hardware: Hardware) -> int | list[int]:
    """A count of GPUs as the first of them, or as a list of others where some of the first are busy.

    Raises:
        HardwareError: where one of them cannot be had.
    """

    def rank(index: int) -> tuple[bool, bool, int, int]:
        free = hardware.states[index].memory_free_bytes if hardware.states else None
        is_busy = hardware.occupation(index) is not None
        return bool(hardware.states and hardware.states[index].refusal), is_busy, -(free or 0) if is_busy else 0, index

    indices = chosen if isinstance(chosen, list) else sorted(sorted(range(len(hardware.gpus)), key=rank)[:chosen])
    refused = {i: why for i in indices if hardware.states and (why := hardware.states[i].refusal)}
    if refused:
        index, why = next(iter(refused.items()))
        idle = hardware.idle_gpus
        instead = f"hardware.devices={idle[:1]}".replace(" ", "") if idle else "hardware=cpu, or make it available"
        raise HardwareError(
            f"`hardware.devices` needs GPU {index} {hardware.gpus[index]}, but {why}. Idle: {idle or 'none'}. "
            f"Use {instead}."
        )
    return chosen if isinstance(chosen, list) or indices == list(range(chosen)) else indices


def _explain(
    asked: str, accelerator: str, devices: Any, strategy: str, num_threads: int | str | None, hardware: Hardware
) -> str:
    if accelerator == "gpu":
        indices = devices if isinstance(devices, list) else list(range(devices))
        what = ", ".join(f"GPU {index} {hardware.gpus[index]}" for index in indices)
        idle = len(set(hardware.idle_gpus) - set(indices))
        is_idle = hardware.busy_gpus and set(indices) <= set(hardware.idle_gpus)
        first = "idle" if is_idle else "the first CUDA device found"
        why = "asked for" if asked != "auto" else first
        use = "hardware=auto uses all that are" if hardware.busy_gpus else "hardware=ddp uses all"
        more = f"; {idle} more GPU(s) idle, {use}" if idle and strategy == "auto" else ""
        more += f"; {hardware.busy_gpus}" if hardware.busy_gpus else ""
        if hardware.states and all(hardware.states[index].has_bfloat16 for index in indices):
            more += "; bfloat16 by engine.precision=bf16-mixed"
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
