"""A training step on tensors that have shapes but no memory.

The task, the batch transforms, clipping, the optimiser and the average of the weights are those of a run; every storage
is counted from the operator that makes it to the moment it is freed. What a kernel takes for itself, the gaps of an
allocator and CUDA's own share are not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.autograd import Variable

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.cuda_operators import CudaOperators
from leyden.engine.ema import WeightAverage
from leyden.engine.memory import Phase, StepMemory
from leyden.engine.optim import build_optimizer
from leyden.engine.parallel import cut_layers, fetched_bytes
from leyden.engine.precision import MIXED_FORMATS, TRUE_FORMATS, convert_net
from leyden.engine.recompute import recompute_blocks
from leyden.engine.settings import Engine
from leyden.engine.step import clip_gradient, split_step
from leyden.engine.storages import Tracker
from leyden.engine.task import Task
from leyden.errors import USER_ERRORS, ConfigError

T = TypeVar("T")


class PlanError(ConfigError):
    """A step that cannot be planned, though it may well be trained."""


class StepTracer:
    """Takes training steps of a task on tensors without memory, and leaves the task as it is.

    Args:
        task: as a run has it; on any device.
        data: whose samples it trains on; only their shapes count.
        accelerator: "cuda" counts what CUDA's operators keep, "cpu" what the CPU's do.
        engine: settings that the task has not got yet; its network is then taken to be as it was built. None: the
            task's own.
        tensor_parallel_size: processes that share the network's layers.

    Raises:
        PlanError: when the task cannot be copied.
        ConfigError: when the network cannot do what `engine` asks for, or has no plan for tensor parallel.
    """

    def __init__(
        self,
        task: Task,
        data: DataModule,
        accelerator: str,
        engine: Engine | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.accelerator = accelerator
        self.net = task.net
        self.data = copy.copy(data)  # which keeps what a transform caches
        # Tensors that are no buffers, e.g. of a transform, may be real
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.engine = engine or task.engine
        self.task: Task = self._attempt(lambda: self._copy(task, engine), "be copied")
        if engine is not None and engine.activation_checkpointing:
            recompute_blocks(self.task.net)
        if tensor_parallel_size > 1:
            with self.mode:
                cut_layers(self.task.net, tensor_parallel_size)
        self.fetched = fetched_bytes(self.task.net)
        self.task.engine = self.engine
        self.task.train()
        self.rows = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in data.first_rows(2).items()}

    def _copy(self, task: Task, engine: Engine | None) -> Task:
        if self.engine.number_format in TRUE_FORMATS:  # tensors without memory cannot be converted in a module
            task = copy.deepcopy(task)
            if engine is not None:
                convert_net(task.net, engine.number_format)
            if self.engine.number_format == "64-true":
                task.double()  # as Lightning's plugin does
        with FakeCopyMode(self.mode):
            return copy.deepcopy(task)

    def _attempt(self, action: Callable[[], T], what: str) -> T:
        """What an action gives.

        Raises:
            PlanError: for what does not work on tensors without memory, with the reason.
        """
        try:
            return action()
        except USER_ERRORS:
            raise
        except Exception as err:  # operators that need values raise anything, also AssertionError
            text = str(err).strip()
            raise PlanError(
                f"The memory of this step cannot be planned: {type(self.data).__name__} and {type(self.net).__name__} "
                f"cannot {what} with tensors that have shapes but no values ({type(err).__name__}: "
                f"{text.splitlines()[0] if text else ''}). Values are needed e.g. by .item(), .numpy(), boolean masks "
                "and nonzero. Train without planning."
            ) from err

    def measure(self, batch_size: int, micro_batch_size: int | None, resident: int = 0) -> StepMemory:
        """Takes a step.

        Args:
            batch_size: samples of a batch on one device.
            micro_batch_size: largest number of samples at a time; None takes each batch whole.
            resident: bytes of data that stay on the device; without them samples are copied ahead to a GPU.

        Raises:
            PlanError: when the task or a batch transform needs values.
        """
        return self._attempt(lambda: self._measure(batch_size, micro_batch_size, resident), "take a step")

    def _measure(self, batch_size: int, micro_batch_size: int | None, resident: int) -> StepMemory:
        net, engine = self.task.net, self.engine
        weights = [p for p in net.parameters() if p.requires_grad]
        tracker = Tracker()
        # Nothing draws random numbers on such tensors; a generator that user code seeds is put back
        with torch.random.fork_rng([]), self.mode, tracker:
            tracker.add([*self.task.parameters(), *self.task.buffers()])
            parameters = tracker.current
            batch, phase, raw = self._make_batch(tracker, batch_size)
            batches = [batch] * engine.accumulate_batches
            samples = tracker.current - parameters
            # The gradient is added to that of the parts before from the second on, and there is nothing new after it
            parts = list(islice(split_step(batches, [batch_size] * len(batches), micro_batch_size, 1), 2))
            tracker.begin()
            with self._precision():
                for part in parts:
                    loss, _ = self.task.compute_loss(part.batch)
                    _backward(loss if part.weight == 1 else loss * part.weight)
                    del loss
            found = [p.grad for p in weights if p.grad is not None]
            gradients = sum(g.untyped_storage().nbytes() for g in found)
            peak, there = tracker.peak(found)
            steps = [phase, Phase("gradient", there, peak - parameters - samples - there)]
            before = tracker.current
            tracker.begin()
            optimizer, average = self._update(weights)
            state, averaged = _state_bytes(optimizer), _average_bytes(average)
            peak, _ = tracker.peak([])
            steps.append(Phase("update", gradients, max(0, peak - before - state - averaged)))
            for p in weights:
                p.grad = None
        steps[0] = replace(phase, gradients=gradients)  # those of the step before
        calls = engine.steps_per_execution if isinstance(engine.steps_per_execution, int) else 1
        ahead = 0 if resident or self.accelerator == "cpu" else 2 * calls * engine.accumulate_batches * raw
        return StepMemory(
            parameters=parameters,
            gradients=gradients,
            optimizer_state=state,
            average=averaged,
            batch=samples * engine.accumulate_batches + ahead,
            resident=resident,
            phases=tuple(steps),
            fetched=self.fetched,
        )

    def _make_batch(self, tracker: Tracker, batch_size: int) -> tuple[Batch, Phase, int]:
        """A batch as the network takes it, the peak of making it, and the bytes of its samples as they come."""
        widens = self.engine.number_format == "64-true"
        tracker.begin()
        start = tracker.current
        rows = {
            name: torch.empty(batch_size, *shape, dtype=torch.float64 if widens and dtype.is_floating_point else dtype)
            for name, (shape, dtype) in self.rows.items()
        }
        raw = tracker.current - start
        generator = torch.Generator() if self.data.has_augmentation else None
        batch = self.data.transform_batch(rows, generator)
        del rows
        peak, _ = tracker.peak([])
        return batch, Phase("batch", 0, max(0, peak - tracker.current)), raw

    @contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = MIXED_FORMATS.get(self.engine.number_format)
        mixed: AbstractContextManager[Any] = nullcontext()
        if dtype is not None:
            mixed = torch.autocast("cpu", dtype, cache_enabled=False)  # as Lightning's plugin does
        operators = CudaOperators(dtype is not None) if self.accelerator == "cuda" else nullcontext()
        with mixed, operators:
            yield

    def _update(self, weights: Sequence[nn.Parameter]) -> tuple[torch.optim.Optimizer, WeightAverage | None]:
        engine, net = self.engine, self.task.net
        optimizer = build_optimizer(self.task.optim, net)
        if self.accelerator == "cuda":  # where torch takes all weights at a time if nothing else is asked for
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        clip_gradient(weights, engine.gradient_clip_norm, engine.gradient_clip_value)
        optimizer.step()
        average = None
        if engine.ema_decay is not None:
            average = WeightAverage(net, engine.ema_decay, 0)
            for step in (1, 2):
                average.update(step)
        return optimizer, average


def _backward(loss: Tensor) -> None:
    # torch's own function of that name would switch `CudaOperators` off, also for blocks that are computed again
    Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, Tensor) and value.ndim)


def _average_bytes(average: WeightAverage | None) -> int:
    tensors = (average._average if average else None) or []
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
