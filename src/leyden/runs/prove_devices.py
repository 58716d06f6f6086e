"""The proof that an experiment gives one result, however many processes train it and however they share the work."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from leyden.engine.checkpoint import read_checkpoint
from leyden.errors import ConfigError
from leyden.runs.prove_resume import RefusedError, run_training

TOLERANCE = 1e-5  # relative
# Sums of parts are added up in another order, and steps make their last digits larger: Adam divides a gradient that is
# nearly zero by its own size. In float32 twenty steps may make 1e-7 a percent; in float64 a true difference stands out.
PRECISION = "engine.precision=64"
STRATEGIES = ("ddp_cpu", "fsdp_cpu", "tensor_parallel_cpu")
DIGITS = 4  # of the metrics that a run prints


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: for people.
        overrides: of the hardware.
        devices: processes.
    """

    name: str
    overrides: tuple[str, ...]
    devices: int


@dataclass
class Found:
    """What a way gave.

    Attributes:
        losses: global mean loss of each optimiser step.
        weights: at the end.
        metrics: of validation and test.
        orders: the hash of each epoch's order of samples.
        parameter_bytes: that each process held.
        part_fracs: what each process held of the parameters that are held in parts; NaN where none are.
        bytes_per_step: that each process put into collective operations.
    """

    losses: list[float]
    weights: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    orders: list[str]
    parameter_bytes: list[int]
    part_fracs: list[float]
    bytes_per_step: list[float]


@dataclass
class Comparison:
    """A way beside one process.

    Attributes:
        way: what is compared.
        found: what it gave.
        loss_difference: the largest of all steps, relative.
        weight_difference: the largest, relative to the largest weight of the same tensor.
        metrics: names of those that differ in a digit that is printed.
        same_order: whether the samples came in the same order.
    """

    way: Way
    found: Found
    loss_difference: float
    weight_difference: float
    metrics: list[str]
    same_order: bool

    @property
    def is_equal(self) -> bool:
        """Whether all is within tolerance."""
        within = max(self.loss_difference, self.weight_difference) <= TOLERANCE
        return within and not self.metrics and self.same_order


@dataclass
class DeviceProof:
    """All ways that were compared with one process.

    Attributes:
        reference: what one process gave.
        comparisons: the others.
        refused: ways that the experiment or the machine does not allow, and why.
    """

    reference: Found
    comparisons: list[Comparison] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def all_equal(self) -> bool:
        """Whether there are other ways, and each gave the result of one process."""
        return bool(self.comparisons) and all(comparison.is_equal for comparison in self.comparisons)

    def table(self) -> Table:
        """The table that the command prints: relative differences; bytes of parameters and sent per step.

        "parts" is the share that a process has of the parameters that are held in parts. Of processes that differ it is
        the largest.
        """
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=0,
            show_edge=False,
            title=f"{len(self.reference.losses)} steps beside one process",
        )
        table.add_column("way", no_wrap=True)
        for name in ("loss", "weights", "metrics", "order", "holds", "parts", "sends", "equal"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row("1 process", "", "", "", "", _bytes(self.reference.parameter_bytes), "", _bytes([0]), "")
        for one in self.comparisons:
            table.add_row(
                one.way.name,
                f"{one.loss_difference:.0e}",
                f"{one.weight_difference:.0e}",
                "equal" if not one.metrics else ", ".join(one.metrics),
                "equal" if one.same_order else "[red]other[/]",
                _bytes(one.found.parameter_bytes),
                _share(one.found.part_fracs),
                _bytes(one.found.bytes_per_step),
                "[green]yes[/]" if one.is_equal else "[red]NO[/]",
            )
        for name in self.refused:
            table.add_row(name, *[""] * 7, "refused")
        return table


def prove_devices(
    overrides: Sequence[str],
    cfg: DictConfig,
    strategies: Sequence[str],
    devices: Sequence[int],
    steps: int,
    folder: Path,
) -> DeviceProof:
    """Trains an experiment in one process and in other ways, and compares.

    Args:
        overrides: the command line of the experiment.
        cfg: the config that it composes.
        strategies: options of the group `hardware`.
        devices: numbers of processes; those that a strategy refuses are named with its reason.
        steps: optimiser steps of each run.
        folder: where the runs go.

    Raises:
        ConfigError: for a strategy that is not known.
        TrainingError: when a run fails.
    """
    ways = list_ways(strategies, devices)
    off = random_draws(cfg)
    if off:
        Console(stderr=True).print(f"Drawn in each process, so off in this proof: {', '.join(off)}.", style="yellow")
    common = [
        *([] if any(override.startswith("engine.precision=") for override in overrides) else [PRECISION]),
        *overrides,
        *off,
        f"trainer.max_steps={steps}",
        "trainer.log_every_n_steps=1",
        "logger=null",
        "callbacks.progress=null",
        "+callbacks.traffic._target_=leyden.callbacks.traffic.Traffic",
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("one process", total=len(ways) + 1)
        one = ("hardware=cpu", "hardware.num_threads=1")
        reference = read_run(run_training([*common, *one], folder / "one"), 1)
        proof = DeviceProof(reference)
        for number, way in enumerate(ways):
            progress.update(bar, advance=1, description=way.name)
            try:
                run = run_training([*common, *way.overrides], folder / str(number))
            except RefusedError as err:
                proof.refused[way.name] = str(err)
                continue
            proof.comparisons.append(compare(way, reference, read_run(run, way.devices)))
        progress.update(bar, advance=1)
    return proof


def list_ways(strategies: Sequence[str], devices: Sequence[int]) -> list[Way]:
    """Every strategy with every number of processes.

    Raises:
        ConfigError: for a strategy or number that is not known.
    """
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown or not strategies:
        raise ConfigError(f"--strategies: {', '.join(unknown) or 'none'}. Allowed: {', '.join(STRATEGIES)}.")
    if not devices or min(devices) < 1:
        raise ConfigError(f"--devices must be numbers from 1 on, e.g. 1,2,3, got {list(devices)}.")
    ways = []
    for strategy in strategies:
        for count in devices:
            if count == 1:  # a group of one process is one process
                continue
            overrides = (f"hardware={strategy}", f"hardware.devices={count}", "hardware.num_threads=1")
            ways.append(Way(f"{strategy} {count}", overrides, count))
    return ways or [Way("1 process, again", ("hardware=cpu", "hardware.num_threads=1"), 1)]


def random_draws(cfg: DictConfig) -> list[str]:
    """Overrides that switch off what each process draws for itself: augmentation and dropout."""
    off = [f"data.augment.{name}=null" for name, value in (cfg.data.get("augment") or {}).items() if value is not None]
    net: dict[str, Any] = OmegaConf.to_container(cfg.model.net, resolve=True)  # type: ignore[assignment]
    return off + [f"model.net.{key}=0.0" for key, value in net.items() if re.search(r"(^|_)dropout$", key) and value]


def read_run(run: Path, count: int) -> Found:
    """Reads a run folder of a proof."""
    history = pl.read_csv(run / "history.csv", infer_schema_length=None)
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    traffic = [json.loads((run / f"traffic_{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    metrics: dict[str, Any] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    order = run / "order.log"
    return Found(
        losses=history["train/loss_step"].drop_nulls().to_list(),
        weights={name: value for name, value in checkpoint["state_dict"].items() if name.startswith("net.")},
        metrics={name: value for name, value in metrics.items() if name.startswith(("val/", "test/"))},
        orders=order.read_text(encoding="utf-8").splitlines() if order.is_file() else [],
        parameter_bytes=[row["parameter_bytes"] for row in traffic],
        part_fracs=[row["part_bytes"] / row["parted_bytes"] if row["parted_bytes"] else math.nan for row in traffic],
        bytes_per_step=[row["bytes_per_step"] for row in traffic],
    )


def compare(way: Way, reference: Found, found: Found) -> Comparison:
    """Compares what a way gave with what one process gave."""
    losses = list(zip(reference.losses, found.losses, strict=False))
    alike = len(reference.losses) == len(found.losses) and reference.weights.keys() == found.weights.keys()
    other = float("inf")
    return Comparison(
        way,
        found,
        max((abs(a - b) / max(abs(a), 1e-12) for a, b in losses), default=0.0) if alike else other,
        max(map(_difference, reference.weights.values(), found.weights.values())) if alike else other,
        [
            name
            for name in sorted({*reference.metrics, *found.metrics})
            if _printed(reference.metrics.get(name)) != _printed(found.metrics.get(name))
        ],
        reference.orders == found.orders,
    )


def _difference(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).abs().max() / first.double().abs().max().clamp_min(1e-12))


def _printed(value: float | None) -> str | None:
    return None if value is None else f"{value:.{DIGITS}f}"


def _bytes(values: Sequence[float]) -> str:
    largest = max(values)
    return f"{largest / 1e6:,.1f} MB" if largest >= 1e6 else f"{largest / 1e3:,.1f} kB"


def _share(fracs: Sequence[float]) -> str:
    return "" if math.isnan(fracs[0]) else f"{100 * max(fracs):.0f} %"
