"""Which devices a run takes on machines of all kinds, and what is said where they are not there."""

from typing import Any

import pytest

from leyden.errors import HardwareError
from leyden.hardware.plan import HardwarePlan, plan_hardware
from leyden.hardware.probe import Hardware, probe_hardware

CPU = Hardware(gpus=(), mps=False, cpu="Xeon", num_cores=4)
ONE_CORE = Hardware(gpus=(), mps=False, cpu="Atom", num_cores=1)
MAC = Hardware(gpus=(), mps=True, cpu="Apple M3", num_cores=8)
BOTH = Hardware(gpus=("T4",), mps=True, cpu="Xeon", num_cores=2)
ONE_GPU = Hardware(gpus=("NVIDIA H200",), mps=False, cpu="Xeon", num_cores=16)
FOUR_GPUS = Hardware(gpus=("A100", "A100", "T4", "T4"), mps=False, cpu="Xeon", num_cores=16)


def plan(hardware: Hardware, **changes: Any) -> HardwarePlan:
    settings: dict[str, Any] = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "num_threads": None}
    settings["channels_last"] = "auto"
    return plan_hardware(**(settings | changes), hardware=hardware)


@pytest.mark.parametrize(
    ("hardware", "changes", "accelerator", "devices", "reason"),
    [
        (CPU, {}, "cpu", 1, "CPU Xeon (4 cores) (no CUDA or Apple GPU found)"),
        (CPU, {"accelerator": "cpu"}, "cpu", 1, "CPU Xeon (4 cores) (asked for)"),
        (
            CPU,
            {"num_threads": 2},
            "cpu",
            1,
            "CPU Xeon (4 cores, 2 thread(s) per operator) (no CUDA or Apple GPU found)",
        ),
        (CPU, {"strategy": "ddp"}, "cpu", 4, "CPU Xeon (4 cores) by ddp in 4 processes (no CUDA or Apple GPU found)"),
        (
            CPU,
            {"strategy": "ddp", "devices": 2},
            "cpu",
            2,
            "CPU Xeon (4 cores) by ddp in 2 processes (no CUDA or Apple GPU found)",
        ),
        (MAC, {}, "mps", 1, "Apple GPU (mps) (no CUDA device here)"),
        (MAC, {"accelerator": "mps"}, "mps", 1, "Apple GPU (mps) (asked for)"),
        (MAC, {"accelerator": "cpu"}, "cpu", 1, "CPU Apple M3 (8 cores) (asked for)"),
        (BOTH, {}, "cuda", 1, "GPU 0 T4 (the first CUDA device found)"),
        (ONE_GPU, {}, "cuda", 1, "GPU 0 NVIDIA H200 (the first CUDA device found)"),
        (ONE_GPU, {"accelerator": "gpu"}, "cuda", 1, "GPU 0 NVIDIA H200 (asked for)"),
        (ONE_GPU, {"accelerator": "cpu"}, "cpu", 1, "CPU Xeon (16 cores) (asked for)"),
        (
            FOUR_GPUS,
            {},
            "cuda",
            1,
            "GPU 0 A100 (the first CUDA device found; 3 more GPU(s) idle, hardware=ddp uses all)",
        ),
        (
            FOUR_GPUS,
            {"devices": [2]},
            "cuda",
            [2],
            "GPU 2 T4 (the first CUDA device found; 3 more GPU(s) idle, hardware=ddp uses all)",
        ),
        (
            FOUR_GPUS,
            {"strategy": "ddp"},
            "cuda",
            4,
            "GPU 0 A100, GPU 1 A100, GPU 2 T4, GPU 3 T4 by ddp in 4 processes (the first CUDA device found)",
        ),
        (
            FOUR_GPUS,
            {"strategy": "ddp", "devices": [1, 3], "accelerator": "gpu"},
            "cuda",
            [1, 3],
            "GPU 1 A100, GPU 3 T4 by ddp in 2 processes (asked for)",
        ),
    ],
)
def test_choice_and_reason(
    hardware: Hardware, changes: dict[str, Any], accelerator: str, devices: int | list[int], reason: str
) -> None:
    found = plan(hardware, **changes)
    strategy = changes.get("strategy", "auto")
    assert found.trainer_arguments() == {"accelerator": accelerator, "devices": devices, "strategy": strategy}
    assert found.num_devices == (len(devices) if isinstance(devices, list) else devices)
    assert found.num_threads == changes.get("num_threads")
    assert found.reason == reason


@pytest.mark.parametrize(
    ("hardware", "changes", "words"),
    [
        (
            CPU,
            {"accelerator": "gpu"},
            "`hardware.accelerator` is gpu, but there is none here. Found: CPU Xeon (4 cores). Use hardware=cpu, or "
            "hardware=auto to take the best there is.",
        ),
        (CPU, {"accelerator": "mps"}, "`hardware.accelerator` is mps, but there is none here."),
        (MAC, {"accelerator": "gpu"}, "Found: Apple GPU (mps), CPU Apple M3 (8 cores)."),
        (FOUR_GPUS, {"accelerator": "mps"}, "Found: GPU 0 A100, GPU 1 A100, GPU 2 T4, GPU 3 T4, CPU Xeon (16 cores)."),
        (
            FOUR_GPUS,
            {"devices": 8, "strategy": "ddp"},
            "`hardware.devices` must be between 1 and 4 for gpu on this machine, got 8. Use hardware.devices=auto.",
        ),
        (
            CPU,
            {"devices": 5, "strategy": "ddp"},
            "`hardware.devices` must be between 1 and 4 for cpu on this machine, got 5.",
        ),
        (
            FOUR_GPUS,
            {"devices": 2},
            "`hardware.devices` asks for 2 devices, but hardware.strategy=auto is one process. Use hardware=ddp to "
            "train on several devices.",
        ),
        (FOUR_GPUS, {"devices": [0, 1, 2]}, "`hardware.devices` asks for 3 devices, but hardware.strategy=auto is one"),
        (
            CPU,
            {"devices": [0]},
            "`hardware.devices` is a list of indices, but CPUs have none. Give a number.",
        ),
        (
            FOUR_GPUS,
            {"devices": [1, 4], "strategy": "ddp"},
            "`hardware.devices` must be a list of different indices out of [0, 1, 2, 3], got [1, 4].",
        ),
        (
            FOUR_GPUS,
            {"devices": [1, 1], "strategy": "ddp"},
            "must be a list of different indices out of [0, 1, 2, 3], got [1, 1]",
        ),
        (FOUR_GPUS, {"devices": []}, "must be a list of different indices out of [0, 1, 2, 3], got []"),
        (
            ONE_GPU,
            {"strategy": "ddp"},
            "`hardware.strategy` ddp needs at least 2 devices, but there is 1 gpu here. Use hardware=auto for one "
            "device.",
        ),
        (ONE_CORE, {"strategy": "ddp"}, "`hardware.strategy` ddp needs at least 2 devices, but there is 1 cpu here."),
        (
            MAC,
            {"strategy": "ddp", "devices": 1},
            "`hardware.strategy` ddp needs several devices; Apple's GPU is one. Use hardware=auto.",
        ),
        (
            MAC,
            {"strategy": "fsdp", "devices": 1},
            "`hardware.strategy` fsdp needs several devices; Apple's GPU is one.",
        ),
        (ONE_GPU, {"strategy": "fsdp"}, "`hardware.strategy` fsdp needs at least 2 devices, but there is 1 gpu here."),
        (
            FOUR_GPUS,
            {"strategy": "tensor_parallel", "devices": 1},
            "`hardware.strategy` tensor_parallel needs at least 2 devices, but hardware.devices is 1.",
        ),
        (
            FOUR_GPUS,
            {"strategy": "fsdp_tensor_parallel"},
            "`hardware.tensor_parallel_size` must share the 4 device(s) evenly with at least 2 in each direction, got "
            "null. Allowed: [2].",
        ),
        (
            FOUR_GPUS,
            {"strategy": "fsdp_tensor_parallel", "tensor_parallel_size": 3},
            "at least 2 in each direction, got 3. Allowed: [2].",
        ),
        (
            FOUR_GPUS,
            {"strategy": "fsdp_tensor_parallel", "tensor_parallel_size": 2, "devices": 2},
            "Use 4 devices or more, or hardware=fsdp.",
        ),
        (
            FOUR_GPUS,
            {"strategy": "fsdp", "tensor_parallel_size": 2},
            "`hardware.tensor_parallel_size` is 2, but with hardware.strategy=fsdp on 4 device(s) it is 1.",
        ),
        (FOUR_GPUS, {"strategy": "fsdp", "num_threads": "auto"}, "`hardware.num_threads` is auto, which measures"),
        (FOUR_GPUS, {"strategy": "fsdp", "channels_last": True}, "`hardware.channels_last` is true, which"),
    ],
)
def test_what_is_not_there_is_an_error(hardware: Hardware, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HardwareError) as caught:
        plan(hardware, **changes)
    assert words in str(caught.value)


def test_this_machine_is_probed_when_no_hardware_is_given() -> None:
    import os

    found = plan_hardware("cpu", "auto", "auto", None, "auto")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert probe_hardware().num_cores == cores
    assert f"({cores} cores)" in found.reason


def test_description_names_everything() -> None:
    assert BOTH.describe() == "GPU 0 T4, Apple GPU (mps), CPU Xeon (2 cores)"


@pytest.mark.parametrize(
    ("strategy", "asked", "data", "tensor"),
    [("ddp", None, 4, 1), ("fsdp", None, 4, 1), ("tensor_parallel", None, 1, 4), ("fsdp_tensor_parallel", 2, 2, 2)],
)
def test_processes_share_samples_or_layers(strategy: str, asked: int | None, data: int, tensor: int) -> None:
    found = plan(FOUR_GPUS, strategy=strategy, tensor_parallel_size=asked)
    assert (found.data_parallel_size, found.tensor_parallel_size) == (data, tensor)
    if strategy == "fsdp_tensor_parallel":
        assert found.reason.endswith(
            "by fsdp_tensor_parallel in 4 processes (the first CUDA device found), 2 x 2 (data x tensor parallel)"
        )
