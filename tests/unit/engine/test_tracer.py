"""A step without memory: bytes that arithmetic gives, and a task that stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.memory import Phase, StepMemory
from leyden.engine.optim import Muon
from leyden.engine.recompute import recompute_blocks
from leyden.engine.schedule import Cosine
from leyden.engine.settings import PLAIN_STEP, Engine
from leyden.engine.task import Task
from leyden.engine.tracer import PlanError, StepTracer

FEATURES = 16


class Points(DataModule):
    """Rows of 16 features, and a target."""

    def load_splits(self) -> dict[str, Batch]:
        rows = {"input": torch.zeros(8, FEATURES), "target": torch.zeros(8, 1)}
        return {"train": rows, "val": rows, "test": rows}


class Fit(Task):
    metric_names = ("mse",)

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self(batch)
        return (output - batch["target"]).pow(2).mean(), output


ADAM = partial(torch.optim.AdamW, lr=0.1, fused=True)


def build(net: nn.Module | None = None, optim: Callable[..., torch.optim.Optimizer] = ADAM) -> Fit:
    return Fit(net or nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 1)), optim, Cosine())


def data(batch_size: int = 64) -> Points:
    points = Points(batch_size=batch_size)
    points.setup()
    return points


def measure(
    task: Task, batch_size: int = 64, micro: int | None = None, accelerator: str = "cpu", **settings: Any
) -> StepMemory:
    engine = replace(PLAIN_STEP, **settings)
    return StepTracer(task, data(batch_size), accelerator, engine).measure(batch_size, micro)


def phase(step: StepMemory, name: str) -> Phase:
    return next(found for found in step.phases if found.name == name)


NUM_WEIGHTS = FEATURES * 32 + 32 + 32 + 1


@pytest.mark.parametrize(
    ("optim", "state"),
    [
        (ADAM, 8 * NUM_WEIGHTS),  # two moments in float32
        (partial(torch.optim.Adam, lr=0.1), 8 * NUM_WEIGHTS),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 4 * NUM_WEIGHTS),
        (partial(torch.optim.SGD, lr=0.1), 0),
        # One moment for the two matrices, two for what is not one
        (partial(Muon, lr=0.1), 4 * (FEATURES * 32 + 32) + 8 * 33),
    ],
)
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_weights_gradients_and_state_are_exact(optim: Any, state: int, accelerator: str) -> None:
    step = measure(build(optim=optim), accelerator=accelerator)
    assert step.parameters == 4 * NUM_WEIGHTS
    assert step.gradients == 4 * NUM_WEIGHTS
    assert step.optimizer_state == state


def test_number_formats_of_the_whole_network() -> None:
    half, double = measure(build(), precision="bf16-true"), measure(build(), precision="64-true")
    assert (half.parameters, half.gradients, half.optimizer_state) == (
        2 * NUM_WEIGHTS,
        2 * NUM_WEIGHTS,
        4 * NUM_WEIGHTS,
    )
    assert (double.parameters, double.optimizer_state) == (8 * NUM_WEIGHTS, 16 * NUM_WEIGHTS)
    assert double.batch == 8 * 64 * (FEATURES + 1)  # Lightning converts the samples
    mixed = measure(build(), precision="bf16-mixed")
    assert (mixed.parameters, mixed.gradients) == (4 * NUM_WEIGHTS, 4 * NUM_WEIGHTS)


def test_average_of_weights_is_a_copy_in_float32() -> None:
    assert measure(build()).average == 0
    assert measure(build(), ema_decay=0.9).average == 4 * NUM_WEIGHTS
    assert measure(build(), ema_decay=0.9, precision="bf16-true").average == 4 * NUM_WEIGHTS


def test_frozen_weights_have_no_gradient() -> None:
    task = build()
    task.net[0].requires_grad_(False)
    step = measure(task)
    assert step.parameters == 4 * NUM_WEIGHTS
    assert step.gradients == 4 * 33
    assert step.optimizer_state == 8 * 33


def test_activations_of_two_layers_by_hand() -> None:
    # Forward: first layer and GELU, 32 numbers a row each, and the output, which the loss squares after a subtraction:
    # output, difference, square. The mean is one number. That is what lives when the forward pass ends, less the
    # square, which its mean does not need, and with the output, which compute_loss gives back, until the loss is taken.
    step = measure(build(), batch_size=1000)
    rows = 4 * 1000
    forward = rows * (32 + 32 + 1 + 1)
    backward = forward + rows * (1 + 32)  # of the output, then of the hidden layer, as large as that
    found = phase(step, "gradient").others + phase(step, "gradient").gradients
    assert forward < found < 1.05 * backward


def test_micro_batches_add_to_a_gradient_that_is_there() -> None:
    whole, cut = measure(build(), 64, None), measure(build(), 64, 16)
    assert phase(whole, "gradient").gradients < whole.gradients
    assert phase(cut, "gradient").gradients == cut.gradients
    assert cut.activations < whole.activations
    assert cut.batch == whole.batch == 4 * 64 * (FEATURES + 1)  # samples of the whole step are there


def test_accumulated_batches_are_all_there() -> None:
    assert measure(build(), accumulate_batches=3).batch == 3 * 4 * 64 * (FEATURES + 1)


def test_samples_are_copied_ahead_to_a_gpu_unless_they_live_there() -> None:
    task, samples = build(), 4 * 64 * (FEATURES + 1)
    tracer = StepTracer(task, data(), "cuda", PLAIN_STEP)
    assert tracer.measure(64, None).batch == 3 * samples  # this step's, the item's, and the next one's
    step = tracer.measure(64, None, resident=1000)
    assert (step.batch, step.resident) == (samples, 1000)


def test_optimiser_that_takes_all_weights_at_a_time_needs_their_size_once_more() -> None:
    looped = partial(torch.optim.AdamW, lr=0.1)  # on CUDA torch takes all at a time, if not told otherwise

    def extra(optim: Any, accelerator: str) -> float:
        step = measure(build(nn.Sequential(*(nn.Linear(16, 16) for _ in range(9))), optim), accelerator=accelerator)
        return phase(step, "update").others / step.parameters

    assert 1 <= extra(looped, "cuda") < 1.1
    assert extra(looped, "cpu") < 0.3  # one weight after the other
    assert extra(ADAM, "cuda") < 0.1  # one kernel


def kept(net: nn.Module, accelerator: str, precision: str = "32-true") -> int:
    step = measure(build(net), 1000, None, accelerator, precision=precision)
    return phase(step, "gradient").gradients + phase(step, "gradient").others


def test_dropout_keeps_bytes_on_cuda() -> None:
    class Twice(nn.Module):
        """Its peak is at the end of the forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 256)
            self.head = nn.Linear(256, 1)

        def forward(self, rows: Tensor) -> Tensor:
            hidden = F.dropout(F.dropout(F.dropout(self.layer(rows), 0.1), 0.1), 0.1)
            return self.head(hidden)

    # Three masks of 256 numbers a row: 1 byte each in place of 4
    assert kept(Twice(), "cpu") - kept(Twice(), "cuda") == pytest.approx(3 * 3 * 256 * 1000, rel=0.35)


class Norm(nn.Module):
    repeated_blocks: ClassVar[str] = "blocks"

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(depth)))
        self.head = nn.Linear(16, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.blocks(rows))


def test_normalisation_is_in_float32_under_autocast_on_cuda_only() -> None:
    assert kept(Norm(), "cuda", "bf16-mixed") > 1.3 * kept(Norm(), "cpu", "bf16-mixed")
    assert kept(Norm(), "cuda") == kept(Norm(), "cpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_recomputing_keeps_less(precision: str, accelerator: str) -> None:
    kept_all = measure(build(Norm(12)), 1000, None, accelerator, precision=precision)
    again = measure(build(Norm(12)), 1000, None, accelerator, precision=precision, activation_checkpointing=True)
    assert again.activations < 0.7 * kept_all.activations


def test_task_of_a_run_is_taken_as_it_is() -> None:
    task, settings = build(Norm(12)), replace(PLAIN_STEP, activation_checkpointing=True, micro_batch_size=250)
    expected = StepTracer(task, data(), "cuda", settings).measure(500, 250)
    recompute_blocks(task.net)
    task.engine = settings
    assert StepTracer(task, data(1000), "cuda").measure(500, 250) == expected


def test_nothing_is_left_behind() -> None:
    task, points = build(nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, 1))), data()
    before, rng = copy.deepcopy(task.state_dict()), torch.get_rng_state()
    attributes = dict(vars(points))
    StepTracer(task, points, "cuda").measure(64, 16)
    assert torch.get_rng_state().equal(rng)
    assert vars(points) == attributes
    assert all(type(p) is nn.Parameter and p.grad is None for p in task.parameters())
    assert all(value.equal(before[name]) for name, value in task.state_dict().items())


@pytest.mark.parametrize("way", ["item", "mask", "numpy"])
def test_steps_that_need_values_are_named(way: str) -> None:
    class Looks(Fit):
        def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, output = super().compute_loss(batch)
            if way == "item":
                loss = loss * loss.item()
            elif way == "mask":
                loss = output[output > 0].sum()
            else:
                loss = loss + float(output.detach().numpy().sum())
            return loss, output

    task = Looks(nn.Linear(FEATURES, 1), ADAM, Cosine())
    with pytest.raises(PlanError, match=r"cannot be planned: Points and Linear cannot take a step .*Train without"):
        StepTracer(task, data(), "cuda").measure(64, None)


def test_engine_of_the_task_is_untouched() -> None:
    task = build()
    measure(task, precision="bf16-true")
    assert task.engine is PLAIN_STEP
    assert isinstance(task.engine, Engine)
    assert next(task.parameters()).dtype is torch.float32
