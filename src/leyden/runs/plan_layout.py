"""How each strategy would lay out its devices, so that what they take can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from torch import nn

from leyden.engine.memory import STRATEGIES
from leyden.engine.parallel import check_sharding
from leyden.engine.settings import Engine
from leyden.errors import ConfigError
from leyden.hardware.plan import SHARDED
from leyden.hardware.probe import Hardware

# Devices of the strategies that share, where neither the config nor this machine has a number
EXAMPLE_DEVICES = 8


@dataclass(frozen=True)
class Layout:
    """Devices of a strategy.

    Attributes:
        data_parallel_size: parts of a batch.
        tensor_parallel_size: devices that share the layers for each of these parts.
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.data_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True)
class Layouts:
    """The config's own strategy, and a layout for each strategy that its network can be trained with."""

    own: str
    of: dict[str, Layout]


def choose_layouts(settings: DictConfig, hardware: Hardware, net: nn.Module, engine: Engine) -> Layouts:
    """Lays out the devices that the config names, or else those of this machine, or else a number for comparison.

    Args:
        settings: the config's section `hardware`.
        hardware: of this machine.
        net: the network.
        engine: how its step is taken.

    Raises:
        ConfigError: when the network cannot be trained with the config's own strategy.
    """
    own, idle = str(settings.strategy), len(hardware.idle_gpus)
    if settings.devices == "idle" and own == "auto" and idle > 1 and settings.accelerator in ("auto", "gpu"):
        own = "ddp"  # as the run would choose
    given = _count(settings.devices)
    count = given or (idle if idle > 1 else EXAMPLE_DEVICES)
    found: dict[str, Layout] = {}
    for strategy in STRATEGIES:
        is_own = strategy == own
        layouts = _layouts(strategy, count, settings.tensor_parallel_size if is_own else None)
        if is_own and given:
            layouts = layouts[:1]
        problems = {layout: find_problem(strategy, layout, net, engine) for layout in layouts}
        possible = [layout for layout, problem in problems.items() if problem is None]
        if possible:
            found[strategy] = possible[0]
        elif is_own:
            raise next(filter(None, problems.values()), _too_few(strategy, count, settings))
    return Layouts(own, found)


def find_problem(strategy: str, layout: Layout, net: nn.Module, engine: Engine) -> ConfigError | None:
    """Why a network cannot be trained so; None where it can."""
    if strategy not in SHARDED:
        return None
    try:
        check_sharding(net, engine, layout.data_parallel_size, layout.tensor_parallel_size)
    except ConfigError as err:
        return err
    return None


def _count(devices: Any) -> int | None:
    """Several devices that the config names by number or index."""
    count = devices if isinstance(devices, int) else 1 if isinstance(devices, str) else len(devices)
    return count if count > 1 else None


def _layouts(strategy: str, count: int, tensor_parallel_size: int | None) -> Sequence[Layout]:
    """Ways of a strategy to lay out up to `count` devices, the one to take first."""
    kind = STRATEGIES[strategy]
    if not kind.cuts_layers:
        return [Layout(1 if strategy == "auto" else count)]
    if not kind.shards_weights:
        return [Layout(1, size) for size in range(count, 1, -1)]
    sizes = [tensor_parallel_size] if tensor_parallel_size else range(2, count)
    return [Layout(count // size, size) for size in sizes if count % size == 0 and count // size > 1]


def _too_few(strategy: str, count: int, settings: DictConfig) -> ConfigError:
    return ConfigError(
        f"`hardware.strategy` {strategy} cannot lay out {count} device(s) with `hardware.tensor_parallel_size` "
        f"{settings.tensor_parallel_size}: at least 2 in each direction, and as many in each row. Give e.g. "
        "hardware.devices=4 hardware.tensor_parallel_size=2."
    )
