"""When memory runs out: the step is taken again in smaller micro-batches, on all processes alike.

In pseudocode::

    while memory runs out on any process in loss or gradient:
        put back what the attempt touched; free what it left
        micro-batch size = half the samples of the largest micro-batch
    exchange gradients; optimiser step

The gradient of the mean over all samples of a step is the same however they are cut, so the batch, the loss and the
weights are those of a run with more memory, up to rounding. What draws random numbers (dropout) draws others, and
BatchNorm sees other batches.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.direct import Calls, choose_calls
from leyden.engine.exchange import Exchange
from leyden.engine.known_sizes import path_of, read_size, write_size
from leyden.engine.step import Part, accumulate_gradient, batch_length, split_step
from leyden.errors import TrainingError, is_out_of_memory
from leyden.sharding import is_sharded

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

T = TypeVar("T")
SMALLEST_WITH_BATCH_NORM = 3  # so that one can go to a last micro-batch of one sample
ADVICE = (
    "Use engine.activation_checkpointing=true, engine.precision=bf16-mixed, a smaller network (model.net), or a device "
    "with more memory (hardware)."
)


class MicroBatches:
    """How many samples a device takes at a time, and what is done where they do not fit.

    Args:
        task: whose steps they are.

    Attributes:
        found: the size that memory left, with `engine.micro_batch_size=auto`; None while whole batches fit.
        eval_size: the same of validation, test and prediction.
        folder: where sizes are kept for later runs; None keeps none.
        is_clipped: whether the gradient of this step is clipped already, so that it is not when the step is repeated.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.found: int | None = None
        self.eval_size: int | None = None
        self.folder: Path | None = None
        self.is_clipped = False
        self._is_restored = False
        self._path: Path | None = None
        self._exchange: Exchange | None = None
        self._has_gradient: list[bool] = []
        self._has_stepped = False
        self._has_batch_norm = False
        self._in_step = False  # whether processes take equally many micro-batches
        self._meets = False
        self._has_warned = False
        self._statistics: list[Tensor] = []
        self._statistics_before: list[Tensor] = []

    @property
    def adapts(self) -> bool:
        """Whether a training step that does not fit is cut.

        Not where processes meet within a step, since they hold parts of the network or BatchNorm takes its statistics
        over all: one that has run out of memory cannot tell the others, who wait for it there.
        """
        return self.task.engine.micro_batch_size == "auto" and not self._meets

    @property
    def size(self) -> int | None:
        """Largest number of samples at a time in training; None takes each batch whole."""
        wanted = self.task.engine.micro_batch_size
        return wanted if isinstance(wanted, int) else self.found

    # ---- over a run --------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, data: object) -> None:
        """Called before the first step of a fit: takes the size that is known to fit, if there is one."""
        syncs = any(isinstance(module, nn.SyncBatchNorm) for module in self.task.net.modules())
        self._in_step = self.task.waits_for_all or (syncs and trainer.world_size > 1)
        self._meets = self._in_step or is_sharded(self.task.net)
        self._exchange = Exchange() if self.adapts and trainer.world_size > 1 else None
        self._has_stepped = False
        if self.found == 1 and self._in_step:
            self.found = 2  # which need equally many micro-batches, also where one has a sample less
        self._has_batch_norm = any(isinstance(module, _BatchNorm) for module in self.task.net.modules())
        self._statistics = [
            buffer
            for module in self.task.net.modules()
            if getattr(module, "running_mean", None) is not None
            for buffer in module.buffers(recurse=False)
        ]
        self._statistics_before = [buffer.clone() for buffer in self._statistics]
        remembers = self.adapts and self.task.engine.remember_micro_batch_size and self.folder is not None
        if not remembers or not isinstance(data, DataModule):
            return
        assert self.folder is not None
        self._path = path_of(self.task, data, self.folder)
        if self._is_restored:
            return  # a resumed run takes what it took
        self.found = trainer.strategy.broadcast(read_size(self._path))
        if self.found is not None:
            log.info(
                "Micro-batches of %d samples, since an earlier run needed them on this device (%s). "
                "engine.remember_micro_batch_size=false starts with whole batches.",
                self.found,
                self._path,
            )

    def restore(self, found: int | None) -> None:
        """Goes on with the size in a checkpoint."""
        self.found, self._is_restored = found, True

    def choose_calls(self) -> Calls:
        """How a step's calls are made: CUDA graphs need more care where a step adds up several gradients."""
        task, optimizer = self.task, self.task.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        adds_up = task.engine.accumulate_batches > 1 or self.size is not None
        copies = adds_up and task.engine.uses_cuda_graphs and task.device.type == "cuda"
        return choose_calls(task, task.trainer, optimizer, copies)

    # ---- loss and gradient -------------------------------------------------------------------------------------

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The task's loss and outputs of a micro-batch; its backward pass fails where that is to be rehearsed."""
        loss, outputs = self.task.compute_loss(batch)
        limit, length = self.task.engine.inject_out_of_memory_above, batch_length(batch)
        if limit is not None and length > limit:
            fail_in_backward(self.task, f"Injected by engine.inject_out_of_memory_above={limit}: {length} samples.")
        return loss, outputs

    def compute_gradient(self, batches: Sequence[Batch], lengths: Sequence[int], step: int) -> None:
        """Leaves the gradient of the mean loss over all samples of a step in the parameters, however it is cut.

        Args:
            batches: this process's part of each batch of the step.
            lengths: samples of each of them over all processes.
            step: from 0.

        Raises:
            TrainingError: when not even one sample at a time fits.
        """
        task, is_cut = self.task, False
        seen = len(task._seen)
        if self.adapts and self._statistics:
            torch._foreach_copy_(self._statistics_before, self._statistics)
        while True:
            task.losses_of_step.clear()
            task.guard.begin()
            parts = self.split(batches, lengths, task._world_size)
            failure = caught(lambda parts=parts: self._add_up(parts, step))  # type: ignore[misc]
            if self._holds(failure, parts):
                break
            is_cut = True
            task._calls.zero_grad()
            task._seen.cut(seen)
            task.guard.undo()
            if self._statistics:
                torch._foreach_copy_(self._statistics, self._statistics_before)
        if is_cut:
            task._calls = self.choose_calls()
            self.announce(sum(lengths), parts)

    def split(self, batches: Sequence[Batch], lengths: Sequence[int], world_size: int) -> list[Part]:
        """The micro-batches of a step; with BatchNorm, which cannot train on one sample, none has just one."""
        min_last = 2 if self._has_batch_norm else 1
        return list(split_step(batches, lengths, self.size, world_size, min_last, self._in_step))

    def _add_up(self, parts: Sequence[Part], step: int) -> None:
        task = self.task

        def compute(part: Part) -> Tensor:
            return task._part_loss(part, step)

        if self._exchange is None:
            accumulate_gradient(parts, compute, task._calls.backward, task._hold_back)
        else:
            with task._hold_back():  # gradients are exchanged once all processes have theirs
                accumulate_gradient(parts, compute, task._calls.backward)

    def _holds(self, failure: str | None, parts: Sequence[Part]) -> bool:
        """Whether the gradient is there on all processes; it is then exchanged, otherwise the size is halved."""
        if self._exchange is None:
            return self.agrees(failure, parts)
        parameters = [p for p in self.task.net.parameters() if p.requires_grad]
        if not self.agrees(failure, parts, parameters):
            return False
        self._exchange.average(parameters, self._has_gradient)
        return True

    def agrees(self, failure: str | None, parts: Sequence[Part], parameters: Sequence[nn.Parameter] = ()) -> bool:
        """Whether an attempt went well on all processes; otherwise the size is halved on all of them.

        Args:
            failure: what ran out of memory here, or None.
            parts: the micro-batches of the attempt.
            parameters: whose gradients the processes ask each other for.

        Raises:
            TrainingError: when the size cannot be halved.
        """
        failed, largest = failure is not None, max(batch_length(part.batch) for part in parts)
        if self._exchange is not None:
            agreement = self._exchange.agree(failed, largest, parameters)
            failed, largest, self._has_gradient = agreement.failed, agreement.largest, agreement.has_gradient
        if not failed:
            return True
        free_memory(self.task.device)
        reason = failure or "another process ran out of memory"
        if not self.adapts:
            auto = "" if self._meets else "auto, or "
            advice = f"Use engine.micro_batch_size={auto}{-(-largest // 2)}. " if largest > 1 else ""
            raise TrainingError(self._explain(f"A micro-batch of {largest} samples", reason, advice + ADVICE))
        if largest == 1:
            raise TrainingError(self._explain("A training step on one sample at a time", reason, ADVICE))
        if self._has_batch_norm and largest <= SMALLEST_WITH_BATCH_NORM:
            what = f"A training step on {largest} samples at a time, with BatchNorm,"
            raise TrainingError(self._explain(what, reason, f"A network with GroupNorm can take fewer. {ADVICE}"))
        self.found = max(-(-largest // 2), SMALLEST_WITH_BATCH_NORM if self._has_batch_norm else 1)
        return False

    def announce(self, num_samples: int, parts: Sequence[Part]) -> None:
        """Says how steps are taken from now on, and keeps it for later runs."""
        task, trainer = self.task, self.task.trainer
        assert self.found is not None
        if not trainer.is_global_zero:
            return
        lengths = [batch_length(part.batch) for part in parts]
        each = f"{max(lengths)}" if len(set(lengths)) == 1 else f"at most {max(lengths)}"
        where = f" on each of {trainer.world_size} devices" if trainer.world_size > 1 else ""
        log.warning(
            "Out of memory: each step of %d samples is now taken as %d x %s%s (engine.micro_batch_size=%d starts like "
            "this).",
            num_samples,
            len(lengths),
            each,
            where,
            self.found,
        )
        if self._has_batch_norm and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s has BatchNorm, which sees micro-batches and not the whole batch, so the result is another than "
                "with more memory.",
                type(task.net).__name__,
            )
        if self._path is not None:
            write_size(self._path, self.found)

    # ---- optimiser step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Lets the optimiser take its step. The first one, which makes its state, is repeated once from where it began.

        Raises:
            TrainingError: when memory runs out again, or at a later step, whose weights may be half updated.
        """
        task = self.task
        optimizer = task.trainer.optimizers[0]
        self.is_clipped = False
        is_first = not self._has_stepped and not optimizer.state
        # A loss scale notes what it has seen of a step, which cannot be put back
        repeats = self.adapts and is_first and getattr(task.trainer.precision_plugin, "scaler", None) is None
        self._has_stepped = True
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if repeats else []
        before = [p.detach().to("cpu", copy=True) for p in parameters]
        failure = caught(task._calls.step)
        if failure is not None and repeats:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            progress = task.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            for counts in (progress.current, progress.total):
                counts.ready = counts.completed
            free_memory(task.device)
            log.warning("Out of memory in the optimiser's first step: it is taken again.")
            failure = caught(task._calls.step)
        if failure is not None:
            what = f"The optimiser step ({type(optimizer).__name__})"
            go_on = "" if is_first else "Weights may be half updated; go on from the last checkpoint with resume=. "
            advice = "Use an optimiser with less state (optim=sgd), or a smaller network (model.net)."
            raise TrainingError(self._explain(what, failure, go_on + advice))

    # ---- evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, compute: Callable[[Batch], T]) -> Iterator[tuple[Batch, T]]:
        """What `compute` gives for a batch, in halves, quarters, ... where the whole does not fit.

        Args:
            batch: may be empty, as a process's part of the last batch of an epoch.
            compute: without a trace where it fails.

        Returns:
            each part of the batch with its result.

        Raises:
            TrainingError: when one sample does not fit.
        """
        start, length, is_cut = 0, batch_length(batch), False
        if length == 0 and self.task.waits_for_all:
            self.task(batch)  # with the others, who fetch weights from all processes layer by layer
        while start < length:
            size = min(self.eval_size or length, length - start)
            part = batch if size == length else {name: rows[start : start + size] for name, rows in batch.items()}
            results: list[T] = []
            failure = caught(lambda part=part, results=results: results.append(compute(part)))  # type: ignore[misc]
            if failure is None:
                if is_cut:
                    log.warning("Out of memory: batches are now evaluated %d samples at a time.", size)
                    is_cut = False
                yield part, results.pop()
                start += size
                continue
            free_memory(next(iter(batch.values())).device)
            if size == 1:
                raise TrainingError(self._explain("The evaluation of one sample", failure, ADVICE))
            if is_sharded(self.task.net):  # the others do not know of it
                what = f"The evaluation of {size} samples, of which parts of the network are on other devices,"
                raise TrainingError(self._explain(what, failure, "Use a smaller data.batch_size. " + ADVICE))
            self.eval_size, is_cut = -(-size // 2), True

    def predict(self, batch: Batch) -> Tensor:
        """The network's output for a batch."""
        outputs = [output for _, output in self.evaluate(batch, self.task)]
        if not outputs:
            return self.task(batch)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _explain(self, what: str, reason: str, advice: str) -> str:
        return f"{what} does not fit into memory: {reason} {advice}\n{describe_memory(self.task.device)}"


def caught(action: Callable[[], object]) -> str | None:
    """Does something; what ran out of memory, or None where nothing did. Other errors pass.

    The error itself is let go of, since it keeps the tensors of the failed attempt.
    """
    try:
        action()
    except (RuntimeError, MemoryError) as err:
        if not is_out_of_memory(err):
            raise
        return str(err).splitlines()[0] if str(err) else type(err).__name__
    return None


def fail_in_backward(task: Task, message: str) -> None:
    """Lets the next backward pass run out of memory at the network's first weight, so nearly at its end."""
    weight = next(p for p in task.net.parameters() if p.requires_grad)

    def fail(gradient: Tensor) -> None:
        handle.remove()
        raise torch.OutOfMemoryError(message)

    handle = weight.register_hook(fail)


def free_memory(device: torch.device) -> None:
    """Gives back what nothing holds any more."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def describe_memory(device: torch.device) -> str:
    """How much memory is in use, for people."""
    if device.type == "cuda":
        return torch.cuda.memory_summary(device, abbreviated=True)
    used, memory = psutil.Process().memory_info().rss, psutil.virtual_memory()
    gib = 2**30
    return (
        f"Memory: this process has {used / gib:.2f} GiB; {memory.available / gib:.2f} of {memory.total / gib:.2f} GiB "
        "are available."
    )
