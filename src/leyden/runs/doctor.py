"""`leyden doctor`: what this machine has, how fast it is, and what that means for a training step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.optim import build_optimizer
from leyden.engine.task import Task
from leyden.errors import HardwareError
from leyden.hardware.layout import lay_out
from leyden.hardware.measure import DeviceSpeed, measure_device, synchronise, time_calls
from leyden.hardware.plan import plan_hardware
from leyden.hardware.probe import Hardware, Survey, survey_hardware
from leyden.hardware.threads import granted_threads
from leyden.wiring import build_data, build_task

Announce = Callable[[str], None]

WITHOUT_GPU = (
    "No GPU here, so these were not measured: bfloat16, TF32 and float16 on tensor cores beside the card's peak, "
    "copies from pinned and pageable memory, launch latency, and what a GPU gains in the step and loses by copies and "
    "waiting."
)


@dataclass(frozen=True)
class StepTime:
    """One training step (augmentation, loss, gradient, optimiser) of an experiment on a device.

    Attributes:
        device: as torch calls it.
        num_threads: CPU threads of an operator, for the CPU.
        batch_size: samples of the step.
        step_ms: with the samples on the device, steps in a row.
        transfer_ms: to copy the samples of a step there, where they do not stay there; None on the CPU.
        synchronise_ms: what a step takes longer where the host waits for each; None on the CPU.
    """

    device: str
    num_threads: int | None
    batch_size: int
    step_ms: float
    transfer_ms: float | None
    synchronise_ms: float | None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `leyden doctor` finds.

    Attributes:
        survey: what there is.
        choice: what hardware=auto takes of it, and why.
        speeds: of the CPU and each accelerator.
        experiment, steps: whose step was measured, and how long it takes.
        load_average: processes that wanted a core in the minute before; None where the system does not say.
        not_measured: what could not be measured here, and why.
    """

    survey: Survey
    choice: str
    speeds: list[DeviceSpeed]
    experiment: str
    steps: list[StepTime]
    load_average: float | None
    not_measured: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not known is None."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """Tables for people."""
        for table in (self._machine_table(), self._speed_table(), self._step_table()):
            console.print(table)
        cores = self.survey.machine.num_cores
        if self.load_average is not None and self.load_average > cores / 4:
            console.print(
                f"Others were computing here (load {self.load_average:.1f} on {cores} cores), so this machine can do "
                "more than was measured."
            )
        for line in self.not_measured:
            console.print(line)

    def _machine_table(self) -> Table:
        table = _table("Machine", "", "")
        machine, survey = self.survey.machine, self.survey
        quota = "" if machine.cpu_quota is None else f", quota {machine.cpu_quota:g}"
        table.add_row("CPU", f"{machine.cpu}, {machine.num_cores} of {machine.num_cores_total} cores{quota}")
        limit = "no limit" if machine.memory_limit_bytes is None else f"limit {_gib(machine.memory_limit_bytes)}"
        memory = f"{_gib(machine.memory_available_bytes)} available of {_gib(machine.memory_total_bytes)}, {limit}"
        table.add_row("memory", memory)
        table.add_row("NUMA nodes", "; ".join(machine.numa_nodes) or "unknown")
        for index, name in enumerate(survey.hardware.gpus):
            table.add_row(f"GPU {index}", f"{name}{self._describe_gpu(index)}")
        if survey.hardware.mps:
            table.add_row("GPU", "Apple GPU (mps)")
        if not (survey.hardware.gpus or survey.hardware.mps):
            table.add_row("GPU", "none")
        if survey.hardware.gpus:
            table.add_row("driver", f"{survey.driver or 'unknown'}, for CUDA up to {survey.driver_cuda or 'unknown'}")
            table.add_row("pinned memory", "yes" if survey.can_pin_memory else "no")
            table.add_row("MPS server", "yes" if survey.mps_server else "no")
        built = f", built for CUDA {survey.torch_cuda}" if survey.torch_cuda else ""
        table.add_row("torch", f"{survey.torch}{built}{f', cuDNN {survey.cudnn}' if survey.cudnn else ''}")
        for name, value in survey.environment.items():
            table.add_row(name, value)
        table.add_row("hardware=auto", self.choice)
        return table

    def _describe_gpu(self, index: int) -> str:
        if not self.survey.hardware.states:
            return ""
        gpu = self.survey.hardware.states[index]
        parts = [f"{_gib(gpu.memory_free_bytes)} free of {_gib(gpu.memory_total_bytes)}"]
        parts += [f"capability {gpu.capability[0]}.{gpu.capability[1]}"] if gpu.capability else []
        parts += [f"computing {gpu.utilisation_frac:.0%} of the time"] if gpu.utilisation_frac is not None else []
        parts += [f"{gpu.num_processes} process(es)"] if gpu.num_processes is not None else []
        parts += [f"compute mode {gpu.compute_mode}"] if gpu.compute_mode not in (None, "default") else []
        if self.survey.links:
            links = self.survey.links[index]
            parts += [f"PCIe {links.pcie_generation} x{links.pcie_width}"] if links.pcie_generation else []
            parts += [f"{links.num_nvlinks} NVLinks"] if links.num_nvlinks else []
            parts += ["MIG"] if links.mig_enabled else []
        return "".join(f", {part}" for part in parts)

    def _speed_table(self) -> Table:
        table = _table("Speed", "device", "what", ">measured", ">at most")
        for speed in self.speeds:
            threads = "" if speed.num_threads is None else f", {speed.num_threads} thread(s)"
            device = f"{speed.device}{threads}"
            for matmul in speed.matmuls:
                peak = matmul.peak_tflops
                share = "unknown" if peak is None else f"{peak:g} ({matmul.tflops / peak:.0%})"
                what = f"multiply {matmul.size} x {matmul.size} {matmul.number_format}"
                table.add_row(device, what, f"{matmul.tflops:.3g} TFLOP/s", share)
            rows = {
                "copy in its own memory": (speed.copy_gb_per_s, "GB/s"),
                "copy to it, pinned": (speed.pinned_gb_per_s, "GB/s"),
                "copy to it, pageable": (speed.pageable_gb_per_s, "GB/s"),
                "smallest operator": (speed.launch_us, "us"),
                "wait for it": (speed.synchronise_us, "us"),
            }
            for what, (value, unit) in rows.items():
                if value is not None:
                    table.add_row(device, what, f"{value:.3g} {unit}", "")
        return table

    def _step_table(self) -> Table:
        size = self.steps[0].batch_size
        columns = ("device", ">step", ">beside the best CPU", ">copy of its samples", ">waiting")
        table = _table(f"A step of experiment={self.experiment}, {size} samples", *columns)
        best = min(step.step_ms for step in self.steps if step.num_threads is not None)
        for step in self.steps:
            threads = "" if step.num_threads is None else f", {step.num_threads} thread(s)"
            more = ["" if v is None else f"{v:.2f} ms" for v in (step.transfer_ms, step.synchronise_ms)]
            table.add_row(f"{step.device}{threads}", f"{step.step_ms:.2f} ms", f"{best / step.step_ms:.2f} x", *more)
        return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=any(columns))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def accelerators(hardware: Hardware) -> list[tuple[torch.device, str]]:
    """The accelerators that take work, and their names."""
    refused = refusals(hardware)
    names = [(index, name) for index, name in enumerate(hardware.gpus) if index not in refused]
    found = [(torch.device("cuda", index), name) for index, name in names]
    return found + ([(torch.device("mps"), "Apple GPU")] if hardware.mps else [])


def refusals(hardware: Hardware) -> dict[int, str]:
    """The GPUs that take no work from this process, and why."""
    return {index: why for index, state in enumerate(hardware.states) if (why := state.refusal) is not None}


def diagnose(cfg: DictConfig, announce: Announce = lambda what: None) -> Diagnosis:
    """Looks at this machine and measures it, in less than half a minute without a GPU.

    Args:
        cfg: the config of the experiment whose step is measured; its hardware section does not count.
        announce: told what is measured next.
    """
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    granted = granted_threads()
    torch.set_num_threads(granted)
    survey = survey_hardware()
    hardware = survey.hardware
    cpu, devices = torch.device("cpu"), accelerators(hardware)
    pins = survey.can_pin_memory
    speeds = [measure_device(device, name, pins, announce) for device, name in [(cpu, hardware.cpu), *devices]]
    data = build_data(cfg)
    assert isinstance(data, DataModule)
    steps = []
    for threads in sorted({1, granted}):
        announce(f"a step on the CPU, {threads} thread(s)")
        torch.set_num_threads(threads)
        steps.append(measure_step(cfg, data, cpu, threads))
    for device, name in devices:
        announce(f"a step on {name}")
        steps.append(measure_step(cfg, data, device, None))
    missing = [f"GPU {index} was not measured: {why}." for index, why in refusals(hardware).items()]
    missing += [] if hardware.gpus or hardware.mps else [WITHOUT_GPU]
    return Diagnosis(survey, choose(hardware), speeds, cfg.name, steps, load_average, missing)


def choose(hardware: Hardware) -> str:
    """What hardware=auto takes, and why; or why it cannot."""
    try:
        return plan_hardware(hardware, "auto", "idle", "auto", None, None, "auto", None, None, None, False).reason
    except HardwareError as err:
        return f"refused: {err}"


def measure_step(cfg: DictConfig, data: DataModule, device: torch.device, num_threads: int | None) -> StepTime:
    """Times training steps of an experiment on a device, on its first samples."""
    task = build_task(cfg, data.facts)
    assert isinstance(task, Task)
    lay_out(task.net, "auto", device.type)
    task.to(device).train()
    optimizer = build_optimizer(task.optim, task)
    on_host = data.trim_batch({name: rows.clone() for name, rows in data.first_rows(data.batch_size).items()})
    on_device = {name: rows.to(device) for name, rows in on_host.items()}
    generator = torch.Generator(device).manual_seed(0) if data.has_augmentation else None

    def take_step() -> None:
        batch: Batch = data.transform_batch(dict(on_device), generator)
        optimizer.zero_grad()
        task.compute_loss(batch)[0].backward()
        optimizer.step()

    def take_step_and_wait() -> None:
        take_step()
        synchronise(device)

    def copy() -> None:
        for rows in on_host.values():
            rows.to(device)

    step_s = time_calls(take_step, device)
    is_cpu = device.type == "cpu"
    return StepTime(
        device=str(device),
        num_threads=num_threads,
        batch_size=len(next(iter(on_host.values()))),
        step_ms=1e3 * step_s,
        transfer_ms=None if is_cpu else 1e3 * time_calls(copy, device),
        synchronise_ms=None if is_cpu else 1e3 * (time_calls(take_step_and_wait, device) - step_s),
    )
