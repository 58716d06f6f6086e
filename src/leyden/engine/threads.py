"""`hardware.num_threads=auto`: whether operators are quicker on one thread or on all, measured on the run's steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer

from leyden.data.datamodule import DataModule
from leyden.engine.rehearsal import rehearse

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

STEPS = 7
# Threads that gain less are left to others; and a choice near the limit would fall out differently each time.
WORTHWHILE = 0.9


@dataclass
class ThreadChoice:
    """That a run chooses its threads.

    Attributes:
        before: what it chose before it stopped.
    """

    before: int | None = None


def choose_threads(task: Task, data: DataModule, trainer: Trainer) -> None:
    """Sets torch's threads for the run, if it is to choose them.

    A few steps are taken with one thread and with those that are set, and the medians compared. Sums over rows come
    out differently in their last bits with other threads, so a resumed run takes the number it had.
    """
    if task.thread_choice is None:
        return
    granted = trainer.strategy.broadcast(torch.get_num_threads())  # the processes must agree
    if task.thread_choice.before is not None:
        chosen, why = task.thread_choice.before, "as before the run stopped"
    elif task.device.type != "cpu":
        chosen, why = granted, f"torch's default, since steps are taken on {task.device.type}"
    elif granted == 1:
        chosen, why = 1, "no more are granted"
    else:
        times = {number: measure(task, data, trainer, number) for number in (1, granted)}
        chosen = trainer.strategy.broadcast(decide(times))
        why = ", ".join(f"{1e3 * seconds:.2f} ms a step with {number}" for number, seconds in times.items())
    torch.set_num_threads(chosen)
    log.info("CPU threads of an operator: %d (%s).", chosen, why)


def measure(task: Task, data: DataModule, trainer: Trainer, number: int) -> float:
    """Median time of a step in seconds with a number of threads."""
    torch.set_num_threads(number)
    # What is compiled is compiled for a number of threads; the network itself is measured
    with torch.compiler.set_stance("force_eager"):
        rehearse(task, data, trainer, 1)  # starts the threads
        return median(rehearse(task, data, trainer, STEPS))


def decide(times: dict[int, float]) -> int:
    """The number of threads to take, from the times of a step with the fewest and the most."""
    fewest, most = min(times), max(times)
    return most if times[most] < WORTHWHILE * times[fewest] else fewest
