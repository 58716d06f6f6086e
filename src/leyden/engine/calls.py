"""How many batches one call of the training loop takes: the loop's own cost is per call, not per step."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from leyden.data.datamodule import DataModule
from leyden.data.loaders import BatchLoader
from leyden.engine.rehearsal import measure_step_s
from leyden.sharding import is_sharded

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)


def plan_calls(task: Task, data: DataModule, trainer: Trainer) -> None:
    """Lays out the training loader in items of several batches, and the trainer's limits in items.

    Call it when the task is on its device and before the trainer asks for the training loader. Limits and intervals
    that count batches for the user (`trainer.limit_train_batches`, `trainer.val_check_interval`) keep their meaning.
    """
    num_batches = limit_batches(data.num_train_batches, trainer.limit_train_batches)
    if num_batches == 0:
        return
    data.max_train_batches = num_batches
    trainer.limit_train_batches = 1.0
    accumulate = task.engine.accumulate_batches
    validate_every = limit_batches(num_batches, trainer.val_check_interval)
    within_epoch = validate_every < num_batches
    if within_epoch and validate_every % accumulate:
        validate_every = max(accumulate, validate_every // accumulate * accumulate)
        log.warning("Validation is at the end of optimiser steps: every %d batches.", validate_every)
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    step_time_s = 0.0
    if task.engine.steps_per_execution == "auto":  # steps of a network in parts are not measured, and taken one by one
        step_time_s = math.inf if is_sharded(task.net) else measure_step_s(task, data, trainer)
    save_every = getattr(trainer.checkpoint_callback, "every_n_steps", None)
    intervals = [every, *([save_every] if save_every else [])]
    # Calls also end where the run goes on within an epoch, and where it stops
    steps_per_epoch = -(-num_batches // accumulate)
    cuts = {task.batches_done, max(0, trainer.max_steps) % steps_per_epoch * accumulate}
    if within_epoch:  # the trainer counts calls to the next validation, so all have to be alike
        intervals += [validate_every // accumulate, *(cut // accumulate for cut in cuts if cut)]
        cuts = set()

    def suits(steps: int) -> bool:
        """Whether the count to a validation does not take the shorter last call of an epoch for a whole one."""
        per_call = steps * accumulate
        whole = not within_epoch or num_batches % validate_every == 0
        return whole or -(-num_batches // per_call) % (validate_every // per_call) > 0

    steps = task.engine.choose_steps_per_call(step_time_s, intervals, suits)
    steps = trainer.strategy.broadcast(steps)  # the processes must agree
    data.batches_per_item = steps * accumulate
    data.cuts = cuts
    if task.loops_to_restore:
        loader = data.make_loader("train", shuffle=True)
        assert isinstance(loader, BatchLoader)
        realign(task.loops_to_restore, task.batches_done, loader)
    if within_epoch:
        trainer.val_check_interval = validate_every // data.batches_per_item
    if steps > 1:
        measured = f" (one takes {1e3 * step_time_s:.1f} ms)" if step_time_s else ""
        log.info("Each call of the training loop takes %d steps%s.", steps, measured)


def realign(loops: dict[str, Any], batches_done: int, loader: BatchLoader) -> None:
    """Rewrites a checkpoint's count of calls within the epoch for calls that take other numbers of batches.

    Args:
        loops: the trainer's progress in the checkpoint.
        batches_done: batches that the epoch had handed out.
        loader: in calls as they are now; one of them ends after these batches.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    done = progress["current"]["ready"]
    if not done:
        return
    # At the end of an epoch the loader's position is the start of the next
    shift = (loader.items_until(batches_done) if batches_done else len(loader)) - done
    for counts in (progress["current"], progress["total"]):
        for name in counts:
            counts[name] += shift


def limit_batches(num_batches: int, limit: float | int | None) -> int:
    """What a limit of Lightning's means in batches: a count, or a share of the epoch."""
    if limit is None:
        return num_batches
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def count_steps(task: Task) -> int:
    """Optimiser steps of the whole run of a task, once its trainer has the training loader."""
    trainer = task.trainer
    loader = trainer.train_dataloader
    batches = loader.num_batches if isinstance(loader, BatchLoader) else int(trainer.num_training_batches)
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(-(-batches // task.engine.accumulate_batches) * trainer.max_epochs)
    return max(1, min(limits))
