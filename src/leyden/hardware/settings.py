"""Settings of the device itself: its allocator, and how exactly it multiplies. The same for all devices of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le

from leyden.errors import ConfigError, HardwareError

Fraction = Annotated[float, Gt(0), Le(1)]
MatmulPrecision = Literal["highest", "high", "medium"]

# The second is the name of torch 2.9 and before, which counts where the first is not set
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class DeviceSettings:
    """What `plan_hardware` says of them.

    Args:
        memory_fraction: largest share of a CUDA GPU's memory that torch takes; beyond it a run ends for lack of memory.
        expandable_segments: whether CUDA memory grows in place, which leaves fewer gaps.
        matmul_precision: how exactly float32 is multiplied; less than "highest" lets tensor cores do it.
        cudnn_benchmark: whether cuDNN tries its algorithms on each new shape and takes the fastest.
    """

    memory_fraction: Fraction | None
    expandable_segments: bool | None
    matmul_precision: MatmulPrecision | None
    cudnn_benchmark: bool

    def check(self, accelerator: str) -> None:
        """Refuses what a kind of device ("gpu", "mps", "cpu") cannot honour.

        Raises:
            HardwareError: naming the setting.
        """
        needs = {
            "memory_fraction": (self.memory_fraction, None, ("gpu",), "a limit of the CUDA allocator"),
            "expandable_segments": (self.expandable_segments, None, ("gpu",), "a setting of the CUDA allocator"),
            "matmul_precision": (self.matmul_precision, None, ("gpu", "cpu"), "for CUDA GPUs and CPUs"),
            "cudnn_benchmark": (self.cudnn_benchmark, False, ("gpu",), "a setting of cuDNN, which is for CUDA GPUs"),
        }
        for name, (value, default, where, what) in needs.items():
            if value != default and accelerator not in where:
                shown = {True: "true", False: "false"}.get(value, value)  # type: ignore[call-overload]
                raise HardwareError(
                    f"`hardware.{name}` is {shown}, but this run is on {accelerator}: it is {what}. Allowed here: "
                    f"{'false' if default is False else 'null'}. Set hardware.{name}="
                    f"{'false' if default is False else 'null'}, or use hardware={where[0]}."
                )

    def check_deterministic(self, deterministic: bool) -> None:
        """Refuses what cannot be had together with `engine.deterministic`.

        Raises:
            ConfigError: naming both.
        """
        if self.cudnn_benchmark and deterministic:
            raise ConfigError(
                "`hardware.cudnn_benchmark` is true, but `engine.deterministic` is true too, and the fastest algorithm "
                "may be another one in each run. Set engine.deterministic=false, or hardware.cudnn_benchmark=false."
            )

    def apply(self) -> None:
        """Sets what holds for the whole process, before CUDA starts; null is what held when this process began.

        `memory_fraction` is set where the device of the process is known (`callbacks.memory_limit`), `cudnn_benchmark`
        by the trainer.
        """
        precision, allocator = _given()
        torch.set_float32_matmul_precision(self.matmul_precision or precision)
        _set_allocator(allocator, self.expandable_segments)


@cache
def _given() -> tuple[str, tuple[str | None, ...]]:
    variables = tuple(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    return torch.get_float32_matmul_precision(), variables


def _set_allocator(given: tuple[str | None, ...], expandable_segments: bool | None) -> None:
    """Sets the CUDA allocator for this process, and by the environment for those it starts."""
    before = next((text for text in given if text is not None), "")
    for name, text in zip(ALLOCATOR_VARIABLES, given, strict=True):
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text
    if expandable_segments is None:
        if _expandable(torch._C._accelerator_getAllocatorSettings()) != _expandable(before):  # of an earlier run
            torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
        return
    others = [part for part in before.split(",") if part and not part.strip().startswith("expandable_segments")]
    text = ",".join([*others, f"expandable_segments:{expandable_segments}"])
    os.environ[ALLOCATOR_VARIABLES[0]] = text
    # The allocator has read the environment already, when torch was imported
    torch._C._accelerator_setAllocatorSettings(text)


def _expandable(text: str) -> bool:
    return "expandable_segments:True" in text.replace(" ", "")
