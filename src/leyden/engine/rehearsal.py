"""Steps taken before training to learn how long they take; they leave no trace in the task."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from leyden.data.datamodule import DataModule
from leyden.data.ranks import data_size
from leyden.engine.compile import explain_failure
from leyden.engine.out_of_memory import caught
from leyden.engine.step import Part

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

ENOUGH_S = 2.0


def rehearse(task: Task, data: DataModule, trainer: Trainer, count: int) -> list[float]:
    """Times of loss and gradient of the first batch as a step takes them, in seconds.

    The network trains on it (its micro-batches, its number format), but no weight is changed; running statistics and
    random generators are put back. Where it does not fit, it is cut, as a step is.

    Args:
        task: on its device.
        data: whose first training samples are taken, this process's share of a batch.
        trainer: of the run.
        count: repetitions; fewer, but at least one, where they would take more than two seconds.
    """
    length = -(-data.batch_size // data_size(trainer))
    # Copies, as batches are: a compiled network tells a view from other tensors
    rows = {name: tensor.clone().to(task.device) for name, tensor in data.first_rows(length).items()}
    batch = data.transform_batch(data.trim_batch(rows), None)
    weights: list[Tensor] = [p for p in task.net.parameters() if p.requires_grad]
    buffers = [buffer.clone() for buffer in task.net.buffers()]
    was_training = task.training
    task.train()
    times: list[float] = []
    is_cut = False
    devices = [task.device] if task.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), trainer.precision_plugin.train_step_context():
            while True:
                times.clear()
                parts = task.micro_batches.split([batch], [length], 1)
                failure = caught(lambda parts=parts: _take(task, parts, weights, times, count))  # type: ignore[misc]
                if task.micro_batches.agrees(failure, parts):
                    break
                is_cut = True
    finally:
        task.train(was_training)
        with torch.no_grad():
            for buffer, before in zip(task.net.buffers(), buffers, strict=True):
                buffer.copy_(before)
    if is_cut:
        task.micro_batches.announce(data.batch_size, parts)
    return times


def _take(task: Task, parts: list[Part], weights: list[Tensor], times: list[float], count: int) -> None:
    while len(times) < count and (not times or sum(times) < ENOUGH_S):
        start = time.perf_counter()
        for part in parts:
            loss, _ = task.micro_batches.compute_loss(part.batch)
            torch.autograd.grad(loss, weights, allow_unused=True)
        if task.device.type == "cuda":
            torch.cuda.synchronize(task.device)
        times.append(time.perf_counter() - start)


def compile_first(task: Task, data: DataModule, trainer: Trainer) -> None:
    """Lets a compiled network compile its training step now, and says how long that took.

    Raises:
        ConfigError: when it cannot be compiled.
    """
    mode = task.engine.compile_mode
    if mode == "off":
        return
    try:
        (first,) = rehearse(task, data, trainer, 1)
    except Exception as err:
        explained = explain_failure(err, task.net)
        if explained is None:
            raise
        raise explained from err
    step_s = min(rehearse(task, data, trainer, 3))
    log.info(
        "Compiling the training step took %.1f s (engine.compile=%s); loss and gradient then take %.2f ms a step.",
        first - step_s,
        mode,
        1e3 * step_s,
    )


def measure_step_s(task: Task, data: DataModule, trainer: Trainer) -> float:
    """Time of loss and gradient of one batch on the task's device, in seconds."""
    return min(rehearse(task, data, trainer, 3))
