"""What `leyden doctor` shows of a machine with GPUs, and what it leaves out."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from leyden.hardware.machine import Machine
from leyden.hardware.measure import DeviceSpeed, Matmul
from leyden.hardware.nvml import Gpu, Links
from leyden.hardware.probe import Hardware, Survey
from leyden.runs.doctor import Diagnosis, StepTime, accelerators, choose, refusals

GIB = 2**30
FREE = Gpu("NVIDIA H200", "GPU-1", 140 * GIB, 139 * GIB, 0.0, (9, 0), "default", 0)
TAKEN = replace(FREE, compute_mode="exclusive", num_processes=1)
TWO = Hardware(("NVIDIA H200",) * 2, False, "Xeon", 16, (TAKEN, FREE))
MACHINE = Machine("Xeon", 16, 32, 16.0, 128 * GIB, 100 * GIB, 64 * GIB, ("0-15", "16-31"))
DIAGNOSIS = Diagnosis(
    survey=Survey(
        hardware=TWO,
        machine=MACHINE,
        links=(Links(5, 16, 18, False),) * 2,
        driver="580.65.06",
        driver_cuda="13.0",
        torch="2.14.1",
        torch_cuda="13.0",
        cudnn="92400",
        mps_server=False,
        can_pin_memory=True,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ),
    choice="GPU 1",
    speeds=[
        DeviceSpeed(
            "cuda:1",
            "NVIDIA H200",
            None,
            [Matmul("bfloat16", 8192, 494.75, 989.5), Matmul("tf32", 8192, 300.0, None)],
            4000.0,
            50.0,
            12.0,
            5.0,
            20.0,
        )
    ],
    experiment="vision",
    steps=[StepTime("cpu", 16, 64, 20.0, None, None), StepTime("cuda:1", None, 64, 4.0, 0.25, 0.5)],
    load_average=0.5,
    not_measured=["GPU 0 was not measured."],
)


def shown(diagnosis: Diagnosis) -> str:
    text = io.StringIO()
    diagnosis.print(Console(file=text, width=200))
    return " ".join(text.getvalue().split())


@pytest.mark.parametrize(
    "words",
    [
        "Xeon, 16 of 32 cores, quota 16",
        "100.0 GiB available of 128.0 GiB, limit 64.0 GiB",
        "0-15; 16-31",
        "GPU 1 NVIDIA H200, 139.0 GiB free of 140.0 GiB, capability 9.0, computing 0% of the time, 0 process(es), "
        "PCIe 5 x16, 18 NVLinks",
        "1 process(es), compute mode exclusive",
        "580.65.06, for CUDA up to 13.0",
        # 494.75 of 989.5 TFLOP/s are a half
        "multiply 8192 x 8192 bfloat16 495 TFLOP/s 989.5 (50%)",
        "multiply 8192 x 8192 tf32 300 TFLOP/s unknown",
        "copy to it, pinned 50 GB/s",
        "wait for it 20 us",
        # 20 ms on the CPU beside 4 ms
        "cuda:1 4.00 ms 5.00 x 0.25 ms 0.50 ms",
        "GPU 0 was not measured.",
    ],
)
def test_machine_with_gpus(words: str) -> None:
    assert words in shown(DIAGNOSIS)


def test_busy_machine_is_said() -> None:
    assert "Others were computing" not in shown(DIAGNOSIS)
    assert "Others were computing here (load 9.0 on 16 cores)" in shown(replace(DIAGNOSIS, load_average=9.0))
    assert "Others were computing" not in shown(replace(DIAGNOSIS, load_average=None))


def test_json_has_all_of_it_and_null_for_what_is_not_known() -> None:
    found = json.loads(json.dumps(DIAGNOSIS.as_dict()))
    assert found["speeds"][0]["matmuls"][1]["peak_tflops"] is None
    assert found["survey"]["hardware"]["states"][1]["memory_free_bytes"] == 139 * GIB
    assert found["steps"][0]["transfer_ms"] is None


def test_gpu_that_lets_nobody_in_is_not_measured() -> None:
    assert accelerators(TWO) == [(torch.device("cuda", 1), "NVIDIA H200")]
    assert refusals(TWO) == {0: "its compute mode is exclusive, and another process has it"}
    assert accelerators(Hardware((), True, "M3", 8)) == [(torch.device("mps"), "Apple GPU")]


def test_choice_of_auto_is_shown_also_where_it_cannot_be() -> None:
    assert choose(TWO).startswith("GPU 1 NVIDIA H200 (idle; GPU 0 is busy")
    assert choose(Hardware(("H",), False, "Xeon", 2, (TAKEN,))).startswith("refused: `hardware.devices` needs GPU 0")
