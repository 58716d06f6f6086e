"""Which devices a run takes on machines of all kinds, and what is said where they are not there."""

import os
from typing import Any

import pytest

from leyden.errors import HardwareError
from leyden.hardware.nvml import Gpu
from leyden.hardware.plan import HardwarePlan, plan_hardware
from leyden.hardware.probe import Hardware, probe_hardware

CPU = Hardware(gpus=(), mps=False, cpu="Xeon", num_cores=4)
ONE_CORE = Hardware(gpus=(), mps=False, cpu="Atom", num_cores=1)
MAC = Hardware(gpus=(), mps=True, cpu="Apple M3", num_cores=8)
BOTH = Hardware(gpus=("T4",), mps=True, cpu="Xeon", num_cores=2)
ONE_GPU = Hardware(gpus=("NVIDIA H200",), mps=False, cpu="Xeon", num_cores=16)
FOUR_GPUS = Hardware(gpus=("A100", "A100", "T4", "T4"), mps=False, cpu="Xeon", num_cores=16)
GIB = 2**30

NO_SETTINGS = {
    "tensor_parallel_size": None,
    "memory_fraction": None,
    "expandable_segments": None,
    "matmul_precision": None,
    "cudnn_benchmark": False,
}


def gpu(name: str = "A100", used_gib: int = 0, **more: Any) -> Gpu:
    return Gpu(name, memory_total_bytes=40 * GIB, memory_free_bytes=(40 - used_gib) * GIB, **more)


def with_states(*states: Gpu) -> Hardware:
    return Hardware(tuple(state.name for state in states), False, "Xeon", 16, states)


FIRST_BUSY = with_states(gpu(used_gib=30), gpu(), gpu())


def plan(hardware: Hardware, **changes: Any) -> HardwarePlan:
    settings: dict[str, Any] = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "num_threads": None}
    settings |= {"channels_last": "auto", **NO_SETTINGS}
    return plan_hardware(hardware, **(settings | changes))


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
        (
            CPU,  # processes may share a core
            {"strategy": "ddp", "devices": 5},
            "cpu",
            5,
            "CPU Xeon (4 cores) by ddp in 5 processes (no CUDA or Apple GPU found)",
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


BUSY = "GPU 0 is busy (30.0 of 40.0 GiB in use)"


@pytest.mark.parametrize(
    ("hardware", "changes", "devices", "strategy", "reason"),
    [
        # hardware=auto: all idle ones, by ddp where there are several
        (
            FOUR_GPUS,
            {"devices": "idle"},
            [0, 1, 2, 3],
            "ddp",
            "GPU 0 A100, GPU 1 A100, GPU 2 T4, GPU 3 T4 by ddp in 4 processes (the first CUDA device found)",
        ),
        (
            FIRST_BUSY,
            {"devices": "idle"},
            [1, 2],
            "ddp",
            f"GPU 1 A100, GPU 2 A100 by ddp in 2 processes (idle; {BUSY})",
        ),
        (with_states(gpu(used_gib=30), gpu()), {"devices": "idle"}, [1], "auto", f"GPU 1 A100 (idle; {BUSY})"),
        (ONE_GPU, {"devices": "idle"}, 1, "auto", "GPU 0 NVIDIA H200 (the first CUDA device found)"),
        (CPU, {"devices": "idle"}, 1, "auto", "CPU Xeon (4 cores) (no CUDA or Apple GPU found)"),
        (MAC, {"devices": "idle"}, 1, "auto", "Apple GPU (mps) (no CUDA device here)"),
        # none is idle: the one with the most free memory, and it is said
        (
            with_states(gpu(used_gib=30), gpu(used_gib=20)),
            {"devices": "idle"},
            [1],
            "auto",
            f"GPU 1 A100 (the first CUDA device found; {BUSY}, GPU 1 is busy (20.0 of 40.0 GiB in use))",
        ),
        # one, or a count: idle ones first
        (
            FIRST_BUSY,
            {"accelerator": "gpu"},
            [1],
            "auto",
            f"GPU 1 A100 (asked for; 1 more GPU(s) idle, hardware=auto uses all that are; {BUSY})",
        ),
        (
            FIRST_BUSY,
            {"strategy": "ddp", "devices": 2},
            [1, 2],
            "ddp",
            f"GPU 1 A100, GPU 2 A100 by ddp in 2 processes (idle; {BUSY})",
        ),
        # a busy one that was asked for is taken, and it is said
        (
            FIRST_BUSY,
            {"strategy": "ddp"},
            3,
            "ddp",
            f"GPU 0 A100, GPU 1 A100, GPU 2 A100 by ddp in 3 processes (the first CUDA device found; {BUSY})",
        ),
        (
            FIRST_BUSY,
            {"devices": [0]},
            [0],
            "auto",
            f"GPU 0 A100 (the first CUDA device found; 2 more GPU(s) idle, hardware=auto uses all that are; {BUSY})",
        ),
        (
            with_states(gpu(capability=(8, 0))),
            {},
            1,
            "auto",
            "GPU 0 A100 (the first CUDA device found; bfloat16 by engine.precision=bf16-mixed)",
        ),
        (with_states(gpu("T4", capability=(7, 5))), {}, 1, "auto", "GPU 0 T4 (the first CUDA device found)"),
    ],
)
def test_idle_gpus_are_taken(
    hardware: Hardware, changes: dict[str, Any], devices: int | list[int], strategy: str, reason: str
) -> None:
    found = plan(hardware, **changes)
    assert (found.devices, found.strategy) == (devices, strategy)
    assert found.reason == reason


def test_gpu_that_lets_nobody_in_is_passed_over_or_refused() -> None:
    taken = gpu(compute_mode="exclusive", num_processes=1)
    assert plan(with_states(taken, gpu())).devices == [1]
    assert plan(with_states(taken, gpu(used_gib=30))).devices == [1]  # better a busy one
    for changes in ({"devices": [0]}, {"devices": 2, "strategy": "ddp"}):
        with pytest.raises(HardwareError) as caught:
            plan(with_states(taken, gpu()), **changes)
        assert str(caught.value) == (
            "`hardware.devices` needs GPU 0 A100, but its compute mode is exclusive, and another process has it. "
            "Idle: [1]. Use hardware.devices=[1]."
        )
    with pytest.raises(HardwareError, match=r"Idle: none\. Use hardware=cpu, or make it available"):
        plan(with_states(gpu(compute_mode="prohibited")))


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


def test_cores_of_this_machine() -> None:
    hardware = probe_hardware()
    assert 1 <= hardware.num_cores <= (os.cpu_count() or 1)
    assert f"({hardware.num_cores} cores)" in plan(hardware, accelerator="cpu").reason


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
