"""`leyden plan`: what a training step takes of a device's memory, before there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast, get_args, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from leyden.config import validate
from leyden.data.datamodule import DataModule
from leyden.data.residency import Room, choose_residency, free_memory, free_on, num_bytes
from leyden.engine.memory import STRATEGIES, StepMemory, share
from leyden.engine.settings import Engine
from leyden.engine.task import Task
from leyden.engine.tracer import PlanError, StepTracer
from leyden.errors import ConfigError
from leyden.hardware.layout import lay_out
from leyden.hardware.memory import CARD_MEMORY_MIB, MIB, Budget, format_gib, parse_budget
from leyden.hardware.plan import plan_hardware
from leyden.hardware.probe import Hardware, probe_hardware
from leyden.signatures import locate
from leyden.wiring import Assembly, build_data, build_task, drop_replaced_keys

log = logging.getLogger(__name__)

Announce = Callable[[str], None]
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
# Devices of the strategies that share, where neither the config nor this machine has a number
EXAMPLE_DEVICES = 8
# More parts than this keep a device waiting for the host, so that other changes come first
MAX_CHEAP_PARTS = 8


@dataclass(frozen=True)
class Way:
    """One way to take a step.

    Attributes:
        micro_batch_size: samples at a time on one device, up to its share of the global batch.
        precision: number format, by its full name.
        activation_checkpointing: whether the blocks compute their activations again.
        strategy: a value of `hardware.strategy`; "auto" is one device.
    """

    micro_batch_size: int
    precision: str
    activation_checkpointing: bool
    strategy: str


@dataclass(frozen=True)
class Row:
    """A way, what it takes on each device, and whether that fits (None without a budget)."""

    way: Way
    num_devices: int
    memory: StepMemory
    fits: bool | None


def resident_bytes(data: DataModule, device: torch.device, free: int) -> int:
    """Bytes of training and validation data that a run would keep on a device with `free` bytes."""
    if device.type == "cpu" or not data.splits:
        return 0
    is_mapped = data.is_mapped or data.loading["cache"]
    room = Room(num_bytes(data.splits), device, free, free_memory(), data.trims, is_mapped)
    if choose_residency(data.loading["residency"], room).kind != "device":
        return 0
    return num_bytes({name: rows for name, rows in data.splits.items() if name != "test"})


def find_largest(excess: Callable[[int], int], low: int, high: int) -> int | None:
    """The largest size from `low` to `high` whose excess over a budget is not above 0; None where there is none.

    `high` is looked at first: a batch that is taken whole needs no room for a gradient to add to, so it may take less
    than one in parts. Below it, memory grows with the size, nearly as a straight line.
    """
    if excess(high) <= 0:
        return high
    if low >= high or excess(low) > 0:
        return None
    turn = 0
    while high - low > 1:  # each third guess is for where it is no straight line
        line = low + (high - low) * -excess(low) // (excess(high) - excess(low))
        middle = (low + high) // 2 if turn % 3 == 2 else min(max(line, low + 1), high - 1)
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
        turn += 1
    return low


def smallest_part(task: Task) -> int:
    """Samples that a step needs at a time: BatchNorm cannot train on one."""
    return 1 + any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())


def known_strategies() -> tuple[str, ...]:
    """The values that `hardware.strategy` takes."""
    return get_args(get_type_hints(plan_hardware)["strategy"])


class Planner:
    """Measures ways to take a step of one experiment.

    Args:
        cfg: the resolved config.
        data: its data, or an outline of it.
        task: as it was built, in float32.
        budget: memory of a device, or None.
        hardware: of this machine, for the number of devices.
        announce: told what is measured next.
    """

    def __init__(
        self,
        cfg: DictConfig,
        data: DataModule,
        task: Task,
        budget: Budget | None,
        hardware: Hardware,
        announce: Announce = lambda what: None,
    ) -> None:
        self.engine = Engine(**cfg.engine)
        self.data, self.task, self.budget, self.announce = data, task, budget, announce
        self.accelerator = "cpu" if cfg.hardware.accelerator == "cpu" else "cuda"
        devices, strategy = cfg.hardware.devices, cfg.hardware.strategy
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"leyden plan does not know how `hardware.strategy` {strategy} shares memory. It knows: "
                f"{', '.join(STRATEGIES)}. Give one of these, e.g. hardware.strategy=auto for one device."
            )
        idle = len(hardware.idle_gpus)
        if devices == "idle" and strategy == "auto" and idle > 1 and cfg.hardware.accelerator in ("auto", "gpu"):
            strategy = "ddp"  # as the run would choose
        given = len(devices) if not isinstance(devices, str | int) else devices if isinstance(devices, int) else 1
        self.num_devices = given if given > 1 else idle if idle > 1 else EXAMPLE_DEVICES
        self.has_blocks = hasattr(task.net, "repeated_blocks")
        self.smallest = smallest_part(task)
        free = self.budget.usable if self.budget else 2**62
        self.resident = resident_bytes(data, torch.device(self.accelerator), free)
        self._tracers: dict[tuple[str, bool], StepTracer] = {}
        self._steps: dict[tuple[Any, ...], StepMemory] = {}
        local = self.local_batch(strategy)
        self.own = Way(
            min(self.engine.micro_batch_size or local, local),
            self.engine.number_format,
            self.engine.activation_checkpointing,
            strategy,
        )

    def devices_of(self, strategy: str) -> int:
        """Devices that share a step."""
        return 1 if strategy == "auto" else self.num_devices

    def local_batch(self, strategy: str) -> int:
        """Samples of a global batch on one device."""
        return -(-self.data.batch_size // self.devices_of(strategy))

    def memory(self, way: Way) -> StepMemory:
        """What a step takes on each device.

        Raises:
            PlanError: when the step cannot be taken without values.
        """
        kind, local = (way.precision, way.activation_checkpointing), self.local_batch(way.strategy)
        key = (*kind, local, way.micro_batch_size)
        if key not in self._steps:
            self.announce(f"{way.micro_batch_size} samples in {way.precision}")
            if kind not in self._tracers:
                settings = {"precision": way.precision, "activation_checkpointing": way.activation_checkpointing}
                engine = replace(self.engine, **settings)  # type: ignore[arg-type]
                self._tracers[kind] = StepTracer(self.task, self.data, self.accelerator, engine)
            micro = None if way.micro_batch_size >= local else way.micro_batch_size
            self._steps[key] = self._tracers[kind].measure(local, micro, self.resident)
        return share(self._steps[key], way.strategy, self.devices_of(way.strategy))

    def row(self, way: Way) -> Row:
        """A way with what it takes."""
        memory = self.memory(way)
        fits = memory.total <= self.budget.usable if self.budget else None
        return Row(way, self.devices_of(way.strategy), memory, fits)

    def largest(self, way: Way) -> int | None:
        """The largest micro-batch, up to a device's whole share of the batch, with which a way fits into the budget.

        Its own step was measured, and so was the next larger one, which does not fit. None where nothing fits.
        """
        assert self.budget is not None
        usable = self.budget.usable

        def excess(size: int) -> int:
            return self.memory(replace(way, micro_batch_size=size)).total - usable

        return find_largest(excess, self.smallest, self.local_batch(way.strategy))

    def rows(self, extra: Iterable[int] = ()) -> Iterator[Row]:
        """Ways that people compare: smaller micro-batches, other formats and recomputing, other strategies.

        Args:
            extra: further micro-batches.
        """
        own, local = self.own, self.local_batch(self.own.strategy)
        sizes = {local // 2**power for power in (0, 1, 2, 3)} | {self.smallest, own.micro_batch_size, *extra}
        kept = sorted((s for s in sizes if self.smallest <= s <= local), reverse=True)
        ways = [replace(own, micro_batch_size=size) for size in kept]
        formats = [
            p for p in dict.fromkeys((own.precision, *PRECISIONS)) if self.accelerator != "cpu" or p[0:2] != "16"
        ]
        for precision in formats:
            for recomputes in (False, True) if self.has_blocks else (own.activation_checkpointing,):
                ways.append(replace(own, precision=precision, activation_checkpointing=recomputes))
        for strategy in STRATEGIES:
            size = min(own.micro_batch_size, self.local_batch(strategy))
            ways.append(replace(own, strategy=strategy, micro_batch_size=size))
        yield from map(self.row, dict.fromkeys(ways))


def build_planner(
    cfg: DictConfig, overrides: list[str], budget: str | None, announce: Announce = lambda what: None
) -> Planner:
    """Checks a config, builds its task and what is known of its data, and takes no training step.

    Args:
        cfg: the composed config.
        overrides: the command line's.
        budget: a size, the name of a card, or None for the GPU of this machine, if there is one.
        announce: told what is done.

    Raises:
        ConfigError, DataError, HardwareError: for what is wrong with them.
    """
    given = parse_budget(budget) if budget is not None else None
    drop_replaced_keys(cfg, overrides)
    validate(cfg)
    target = locate(cfg.model._target_)
    if isinstance(target, type) and not issubclass(target, Task):
        raise ConfigError(
            f"leyden plan takes a step of Leyden's own, but `model._target_` {cfg.model._target_} is a plain "
            "LightningModule, whose step only it knows. Derive it from leyden.engine.task.Task, or train it and look "
            "at the memory that is used."
        )
    hardware = probe_hardware()
    cfg = cast(DictConfig, OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    announce("the data")
    data = build_data(cfg, only_outline=True)
    if not isinstance(data, DataModule):
        raise ConfigError(
            f"{type(data).__name__} is no datamodule of Leyden, so the shapes of its batches are not known."
        )
    announce("the network")
    task = build_task(cfg, data.facts)
    assert isinstance(task, Task)
    lay_out(task.net, cfg.hardware.channels_last, cfg.hardware.accelerator)
    given = given or gpu_budget(cfg.hardware.devices, hardware)
    if given is not None and cfg.hardware.accelerator == "cpu":
        given = replace(given, context=0)
    return Planner(cfg, data, task, given, hardware, announce)


def gpu_budget(devices: Any, hardware: Hardware) -> Budget | None:
    """The memory of the GPU that a run here would take, None where there is none or its memory is not known."""
    if not hardware.gpus:
        return None
    index = devices[0] if not isinstance(devices, str | int) and devices else next(iter(hardware.idle_gpus), 0)
    if index >= len(hardware.gpus):
        return None
    name = hardware.gpus[index]
    total = hardware.states[index].memory_total_bytes if hardware.states else None
    total = total or CARD_MEMORY_MIB.get(name, 0) * MIB
    return Budget(total, f"GPU {index} {name}") if total else None


# ---- at the start of a run -----------------------------------------------------------------------------------------


def warn_of_memory(assembly: Assembly) -> None:
    """Warns where the step of a run that begins on a CUDA GPU will hardly fit, and names what helps.

    What cannot be planned is trained all the same; the log says why it was not planned.
    """
    task, data, plan = assembly.task, assembly.data, assembly.plan
    is_known = isinstance(task, Task) and isinstance(data, DataModule) and plan.strategy in STRATEGIES
    if plan.accelerator != "cuda" or not is_known:
        return
    assert isinstance(task, Task)
    assert isinstance(data, DataModule)
    device = assembly.trainer.strategy.root_device
    budget = Budget(free_on(device), f"what is free on {device}", context=0)
    num_devices = assembly.trainer.world_size
    local = -(-data.batch_size // num_devices)
    resident = resident_bytes(data, device, budget.total)

    @cache
    def measure(size: int) -> int:
        step = tracer.measure(local, size if size < local else None, resident)
        return share(step, plan.strategy, num_devices).total

    try:
        tracer = StepTracer(task, data, "cuda")
        peak = measure(min(task.engine.micro_batch_size or local, local))
        if peak <= budget.usable:
            return
        largest = find_largest(lambda size: measure(size) - budget.usable, smallest_part(task), local)
    except PlanError as err:
        log.info("%s", err)
        return
    advice = [f"engine.micro_batch_size={largest}"] if largest is not None else []
    if hasattr(task.net, "repeated_blocks") and not task.engine.activation_checkpointing:
        advice.append("engine.activation_checkpointing=true")
    log.warning(
        "A training step will take about %s, but %s. Use %s; `leyden plan` with this run's overrides shows more.",
        format_gib(peak),
        budget.describe(),
        " or ".join(advice) or "a smaller network",
    )
