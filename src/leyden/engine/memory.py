"""What a training step takes of a device's memory, and how strategies share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PhaseName = Literal["batch", "gradient", "update"]


@dataclass(frozen=True)
class Phase:
    """The peak of one part of the step, in bytes.

    Attributes:
        name: "batch" is conversion and augmentation, "gradient" is loss and backward pass, "update" is clipping, the
            optimiser and the average of the weights.
        gradients: gradients that are there at the moment of the peak.
        others: everything else that is there only for a time.
    """

    name: PhaseName
    gradients: int
    others: int


@dataclass(frozen=True)
class StepMemory:
    """What a training step takes on each device, in bytes.

    Attributes:
        parameters: weights and buffers.
        gradients: of all weights, with the copy that data parallel training sends.
        optimizer_state: without the counters of steps, which are single numbers.
        average: the moving average of the weights (`engine.ema_decay`).
        batch: the samples of a step on this device, as they come and as the network takes them.
        resident: training and validation data that stays on the device.
        phases: the peak of each part of the step.
        fetched: weights that a process of a fully sharded network holds whole at a time, beside its own part.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    average: int
    batch: int
    resident: int
    phases: tuple[Phase, ...]
    fetched: int = 0

    @property
    def lasting(self) -> int:
        """What is there during the whole step."""
        return self.parameters + self.optimizer_state + self.average + self.batch + self.resident

    @property
    def total(self) -> int:
        """The peak."""
        return self.lasting + max(phase.gradients + phase.others for phase in self.phases)

    @property
    def activations(self) -> int:
        """The rest of the peak: what is kept for the backward pass, and temporary results."""
        return self.total - self.lasting - self.gradients


@dataclass(frozen=True)
class Strategy:
    """How devices share a step.

    Attributes:
        shards_weights: whether data parallel processes hold their parts of weights, gradients and optimiser state only.
        copies_gradients: whether gradients are copied into buckets that are sent.
        cuts_layers: whether processes share layers, as the network's `parallel_plan` says.
    """

    shards_weights: bool = False
    copies_gradients: bool = False
    cuts_layers: bool = False


STRATEGIES = {
    "auto": Strategy(),
    "ddp": Strategy(copies_gradients=True),
    "fsdp": Strategy(shards_weights=True),
    "tensor_parallel": Strategy(cuts_layers=True),
    "fsdp_tensor_parallel": Strategy(shards_weights=True, cuts_layers=True),
}


def share(step: StepMemory, strategy: str, data_parallel_size: int) -> StepMemory:
    """A step's memory on one of several devices, from that of one device with the same samples.

    Args:
        step: of one device, of a network whose layers are cut already if the strategy cuts them.
        strategy: a key of `STRATEGIES`.
        data_parallel_size: processes with different samples.
    """
    kind = STRATEGIES[strategy]
    parts = data_parallel_size if kind.shards_weights else 1
    buckets = step.gradients if kind.copies_gradients else 0
    # What is fetched has a gradient of its own size before that is shared out
    fetched = 2 * step.fetched if parts > 1 else 0

    def shared(phase: Phase) -> Phase:
        others = phase.others
        if phase.name == "update":  # its temporary results are as large as the weights that it changes
            others = _part(others, parts)
        elif phase.name == "gradient":
            others += fetched
        return Phase(phase.name, _part(phase.gradients, parts) + buckets, others)

    return replace(
        step,
        parameters=_part(step.parameters, parts),
        gradients=_part(step.gradients, parts) + buckets,
        optimizer_state=_part(step.optimizer_state, parts),
        average=_part(step.average, parts),
        phases=tuple(map(shared, step.phases)),
    )


def _part(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
