"""Backward pass and optimiser step without the trainer's wrappers, where nothing would notice.

Lightning wraps both in hooks of every callback and in profiler contexts, which cost a third of a small step. Where no
callback and no task listens to these hooks, one process trains, and the precision needs no scaler, the wrappers do
nothing but count the steps, and that is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from leyden.engine.compile import keep_gradients

HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
TASK_HOOKS = ("on_before_backward", "on_after_backward", "backward", "optimizer_step")  # the fourth hook is called
# Their backward pass and optimiser step are torch's own; what they do besides is around the whole training step.
PLAIN_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


@dataclass(frozen=True)
class Calls:
    """How a step's calls are made.

    Attributes:
        zero_grad: lets go of the gradient of the step before.
        backward: adds the gradient of a loss.
        step: lets the optimiser take its step, and counts it.
    """

    zero_grad: Callable[[], None]
    backward: Callable[[Tensor], None]
    step: Callable[[], None]


def choose_calls(
    task: LightningModule, trainer: Trainer, optimizer: LightningOptimizer, keeps_gradients: bool = False
) -> Calls:
    """The direct calls where they do the same as Lightning's, otherwise Lightning's.

    Args:
        task: whose hooks may be overridden.
        trainer: of the run.
        optimizer: as Lightning wraps it.
        keeps_gradients: whether each gradient has to be copied out of the memory of CUDA graphs.
    """
    inner = optimizer.optimizer
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]

    def chosen(backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        return keep_gradients(backward, parameters) if keeps_gradients else backward

    if not may_call_directly(task, trainer):
        return Calls(optimizer.zero_grad, chosen(task.manual_backward), lambda: optimizer.step())
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = None

    def step() -> None:
        progress.increment_ready()
        task.on_before_optimizer_step(inner)
        inner.step()
        progress.increment_completed()

    return Calls(zero_grad, chosen(Tensor.backward), step)


def may_call_directly(task: LightningModule, trainer: Trainer) -> bool:
    """Whether Lightning's wrappers of backward and step would do nothing."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    listens = any(is_overridden(hook, callback, Callback) for callback in callbacks for hook in HOOKS)
    listens |= any(is_overridden(hook, task, LightningModule) for hook in TASK_HOOKS)
    precision = trainer.precision_plugin
    return (
        not listens
        and type(trainer.strategy) is SingleDeviceStrategy
        and type(precision) in PLAIN_PRECISIONS
        and getattr(precision, "scaler", None) is None
        and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        and not torch.is_anomaly_enabled()
    )
