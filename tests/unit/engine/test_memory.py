"""The memory of a step: what adds up to its peak, and what strategies share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from leyden.engine.memory import Phase, StepMemory, share
from leyden.engine.parallel import fetched_bytes

# 600 bytes last; the gradient phase has 50 of 100 bytes of gradients beside 400 others, the update has all and 200 more
STEP = StepMemory(
    parameters=100,
    gradients=100,
    optimizer_state=200,
    average=100,
    batch=120,
    resident=80,
    phases=(Phase("batch", 100, 10), Phase("gradient", 50, 400), Phase("update", 100, 200)),
)


def test_peak_is_that_of_the_largest_phase() -> None:
    assert STEP.lasting == 600
    assert STEP.total == 600 + 50 + 400
    assert STEP.activations == STEP.total - 600 - 100  # the rest, so that the parts add up


def test_data_parallel_keeps_gradients_twice() -> None:
    shared = share(STEP, "ddp", 4)
    assert shared.parameters == 100
    assert shared.gradients == 200
    assert shared.total == STEP.total + 100
    assert shared.activations == STEP.activations


def test_sharded_weights_are_a_part() -> None:
    # 25 + 50 + 25 of weights, state and average, with batch and data: 300. Gradients of the peak: 13 of 50.
    shared = share(STEP, "fsdp", 4)
    assert (shared.parameters, shared.gradients, shared.optimizer_state, shared.average) == (25, 25, 50, 25)
    assert shared.total == 300 + 13 + 400
    # Where the optimiser's part is the largest, it shrinks too: temporary results are as large as the weights
    update = StepMemory(100, 100, 200, 0, 0, 0, (Phase("gradient", 0, 10), Phase("update", 100, 100)))
    assert share(update, "fsdp", 4).total == 25 + 50 + 25 + 25


@pytest.mark.parametrize("count", [1, 2])
def test_one_device_shares_nothing(count: int) -> None:
    assert share(STEP, "auto", count) == STEP


def test_what_is_fetched_is_there_with_its_gradient() -> None:
    step = replace(STEP, fetched=30)
    assert share(step, "fsdp", 4).total == share(STEP, "fsdp", 4).total + 60
    assert share(step, "fsdp", 1) == step  # nothing is fetched from itself
    assert share(step, "ddp", 4).total == share(STEP, "ddp", 4).total
    assert share(step, "tensor_parallel", 1) == step


def test_two_blocks_and_what_is_in_none_are_fetched() -> None:
    class Blocks(nn.Module):
        repeated_blocks = "blocks"

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(width, 1, bias=False) for width in (5, 7, 6))
            self.head = nn.Linear(2, 1, bias=False)

    assert fetched_bytes(Blocks()) == 4 * (7 + 6 + 2)
    assert fetched_bytes(nn.Linear(3, 1)) == 4 * 4  # no blocks: all of it
