"""`leyden plan`: what a training step takes of a device's memory, before there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from leyden.config import validate
from leyden.data.datamodule import DataModule
from leyden.data.residency import Room, choose_residency, free_memory, free_on, num_bytes
from leyden.engine.memory import STRATEGIES, StepMemory, share
from leyden.engine.settings import Engine
from leyden.engine.task import Task
from leyden.engine.tracer import StepTracer
from leyden.errors import USER_ERRORS, ConfigError
from leyden.hardware.layout import lay_out
from leyden.hardware.memory import CARD_MEMORY_MIB, MIB, Budget, format_gib, parse_budget
from leyden.hardware.probe import Hardware, probe_hardware
from leyden.runs.plan_layout import Layout, choose_layouts, find_problem
from leyden.signatures import locate
from leyden.wiring import Assembly, build_data, build_task, drop_replaced_keys

log = logging.getLogger(__name__)

Announce = Callable[[str], None]
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")  # 16-mixed takes what bf16-mixed does
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
    """A way, its devices, what it takes on each of them, and whether that fits (None without a budget)."""

    way: Way
    layout: Layout
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


def smallest_part(task: Task, strategy: str) -> int:
    """Samples that a step needs at a time.

    Two for BatchNorm, which cannot train on one, and where processes fetch weights, who take equally many parts.
    """
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())
    return 2 if has_batch_norm or STRATEGIES[strategy].shards_weights else 1


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
        self.name, self.engine = str(cfg.name), Engine(**cfg.engine)
        self.data, self.task, self.budget, self.announce = data, task, budget, announce
        self.accelerator = "cpu" if cfg.hardware.accelerator == "cpu" else "cuda"
        self.has_blocks = hasattr(task.net, "repeated_blocks")
        free = self.budget.usable if self.budget else 2**62
        self.resident = resident_bytes(data, torch.device(self.accelerator), free)
        self._tracers: dict[tuple[str, bool, int], StepTracer] = {}
        self._steps: dict[tuple[Any, ...], StepMemory] = {}
        layouts = choose_layouts(cfg.hardware, hardware, task.net, self.engine)
        self.layouts = layouts.of
        local = self.local_batch(layouts.own)
        micro = self.engine.micro_batch_size
        self.own = Way(
            min(micro, local) if isinstance(micro, int) else local,
            self.engine.number_format,
            self.engine.activation_checkpointing,
            layouts.own,
        )

    def smallest(self, strategy: str) -> int:
        """Samples that a step needs at a time."""
        return smallest_part(self.task, strategy)

    def can_be(self, way: Way) -> bool:
        """Whether the network can be trained so, beside its memory."""
        layout, engine = self.layouts.get(way.strategy), self.engine_of(way)
        return layout is not None and find_problem(way.strategy, layout, self.task.net, engine) is None

    def engine_of(self, way: Way) -> Engine:
        """The settings of a way."""
        return replace(
            self.engine,
            precision=way.precision,  # type: ignore[arg-type]
            activation_checkpointing=way.activation_checkpointing,
            micro_batch_size=way.micro_batch_size,
        )

    def local_batch(self, strategy: str) -> int:
        """Samples of a global batch on one device."""
        return -(-self.data.batch_size // self.layouts[strategy].data_parallel_size)

    def memory(self, way: Way) -> StepMemory:
        """What a step takes on each device.

        Raises:
            PlanError: when the step cannot be taken without values.
        """
        layout, local = self.layouts[way.strategy], self.local_batch(way.strategy)
        kind = (way.precision, way.activation_checkpointing, layout.tensor_parallel_size)
        key = (*kind, local, way.micro_batch_size)
        if key not in self._steps:
            self.announce(f"{way.micro_batch_size} samples in {way.precision}")
            if kind not in self._tracers:
                engine = self.engine_of(way)
                self._tracers[kind] = StepTracer(
                    self.task, self.data, self.accelerator, engine, layout.tensor_parallel_size
                )
            micro = None if way.micro_batch_size >= local else way.micro_batch_size
            self._steps[key] = self._tracers[kind].measure(local, micro, self.resident)
        return share(self._steps[key], way.strategy, layout.data_parallel_size)

    def row(self, way: Way) -> Row:
        """A way with what it takes."""
        memory = self.memory(way)
        fits = memory.total <= self.budget.usable if self.budget else None
        return Row(way, self.layouts[way.strategy], memory, fits)

    def largest(self, way: Way) -> int | None:
        """The largest micro-batch, up to a device's whole share of the batch, with which a way fits into the budget.

        Its own step was measured, and so was the next larger one, which does not fit. None where nothing fits.
        """
        assert self.budget is not None
        usable = self.budget.usable

        def excess(size: int) -> int:
            return self.memory(replace(way, micro_batch_size=size)).total - usable

        return find_largest(excess, self.smallest(way.strategy), self.local_batch(way.strategy))

    def rows(self, extra: Iterable[int] = ()) -> Iterator[Row]:
        """Ways that people compare: smaller micro-batches, other formats and recomputing, other strategies.

        Args:
            extra: further micro-batches.
        """
        own, local, smallest = self.own, self.local_batch(self.own.strategy), self.smallest(self.own.strategy)
        sizes = {local // 2**power for power in (0, 1, 2, 3)} | {smallest, own.micro_batch_size, *extra}
        kept = sorted((s for s in sizes if smallest <= s <= local), reverse=True)
        ways = [replace(own, micro_batch_size=size) for size in kept]
        for precision in dict.fromkeys((own.precision, *PRECISIONS)):
            for recomputes in (False, True) if self.has_blocks else (own.activation_checkpointing,):
                ways.append(replace(own, precision=precision, activation_checkpointing=recomputes))
        for strategy in self.layouts:
            size = max(min(own.micro_batch_size, self.local_batch(strategy)), self.smallest(strategy))
            ways.append(replace(own, strategy=strategy, micro_batch_size=size))
        yield from map(self.row, filter(self.can_be, dict.fromkeys(ways)))


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
    if plan.accelerator != "cuda" or not isinstance(task, Task) or not isinstance(data, DataModule):
        return
    device = assembly.trainer.strategy.root_device
    budget = Budget(free_on(device), f"what is free on {device}", context=0)
    data_parallel_size = assembly.trainer.world_size // plan.tensor_parallel_size
    local, micro = -(-data.batch_size // data_parallel_size), task.engine.micro_batch_size
    resident = resident_bytes(data, device, budget.total)

    @cache
    def measure(size: int) -> int:
        step = tracer.measure(local, size if size < local else None, resident)
        return share(step, plan.strategy, data_parallel_size).total

    try:
        tracer = StepTracer(task, data, "cuda", tensor_parallel_size=plan.tensor_parallel_size)
        peak = measure(min(micro, local) if isinstance(micro, int) else local)
        if peak <= budget.usable:
            return
        smallest = smallest_part(task, plan.strategy)
        largest = find_largest(lambda size: measure(size) - budget.usable, smallest, local)
    except USER_ERRORS as err:  # a run that cannot be planned may be trained all the same
        log.info("%s", err)
        return
    advice = [f"engine.micro_batch_size={largest}"] if largest is not None else []
    if hasattr(task.net, "repeated_blocks") and not task.engine.activation_checkpointing:
        advice.append("engine.activation_checkpointing=true")
    itself = (
        "; if it does run out, it is taken again in smaller parts" if micro == "auto" and not plan.is_sharded else ""
    )
    log.warning(
        "A training step will take about %s, but %s%s. Use %s; `leyden plan` with this run's overrides shows more.",
        format_gib(peak),
        budget.describe(),
        itself,
        " or ".join(advice) or "a smaller network",
    )
