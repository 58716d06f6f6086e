"""What happens when a loss or a gradient is not finite: the run stops with evidence, or the step is skipped.

On one CPU each loss is looked at, before it changes a weight. On an accelerator, and with several processes, looking
would make the host wait at every step: there the device notes the first bad step, which is read where something is
read anyway (the log interval, validation, the end of an epoch, a checkpoint). Steps taken until then are lost, but no
checkpoint is written from them.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.data.loaders import BatchLoader, TensorLoader
from leyden.data.order import epoch_order
from leyden.engine.step import Part
from leyden.errors import TrainingError
from leyden.sharding import all_finite, total_norm

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

NEVER = 2**62
ADVICE = "Lower optim.lr, set engine.gradient_clip_norm, or look for extreme values in the data."


def reads_each_step(task: Task) -> bool:
    """Whether a look at every loss costs next to nothing."""
    return task.device.type == "cpu" and task.trainer.world_size == 1


class FiniteGuard:
    """Watches the losses of a run; steps are numbered as in the logs, from 1.

    Attributes:
        last_finite: the last step known to have a finite loss, and that loss.
        num_skipped: steps skipped so far, also by the loss scale of float16; they do not count for the schedule.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.skips = task.engine.non_finite == "skip"
        self.looks = self.skips or reads_each_step(task)
        self.last_finite: tuple[int, float] | None = None
        self.num_skipped = 0
        self._in_a_row = 0
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=task.device)
        self._first_bad_before = self._first_bad
        self._step_loss = 0.0
        self._is_bad = False
        self._buffers: list[Tensor] = []
        # The loss scale of float16, where there is one, and its value after the last step
        self._scaler = getattr(task.trainer.precision_plugin, "scaler", None)
        self._scale: float | None = None
        self._num_taken = {"interval": 0, "epoch": 0}

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know, as plain values."""
        return {
            "last_finite": self.last_finite,
            "num_skipped": self.num_skipped,
            "in_a_row": self._in_a_row,
            "num_taken": dict(self._num_taken),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.last_finite = state["last_finite"]
        self.num_skipped = state["num_skipped"]
        self._in_a_row = state["in_a_row"]
        self._num_taken = dict(state["num_taken"])

    # ---- within a step -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called before the first loss of a step."""
        self._step_loss, self._is_bad = 0.0, False
        if self._scaler is not None and self._scale is None:
            self._scale = self._scaler.get_scale()  # that of a resumed run is loaded by now
        self._first_bad_before = self._first_bad
        if self.skips:  # running statistics that a bad batch would spoil
            self._buffers = [buffer.clone() for buffer in self.task.net.buffers()]

    def undo(self) -> None:
        """Forgets what was noted since `begin`; the step is taken again."""
        self._first_bad = self._first_bad_before

    def watch(self, part: Part, loss: Tensor, step: int) -> bool:
        """Looks at the mean loss of a micro-batch, or lets the device note it.

        Returns:
            whether the micro-batch counts in the metrics.

        Raises:
            TrainingError: for the policy "stop", with what is known about the cause.
        """
        if not self.looks:
            self._first_bad = torch.where(loss.detach().isfinite(), self._first_bad, self._first_bad.clamp(max=step))
            return True
        value = loss.item()
        if math.isfinite(value):
            self._step_loss += value * part.weight
            return True
        if not self.skips:
            raise TrainingError(self._explain("train/loss_step", value, step, part))
        self._is_bad = True
        return False

    def allows(self, step: int, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimiser may take this step; if not, it is left without a gradient and so changes nothing.

        Raises:
            TrainingError: when more steps in a row than `engine.max_skipped_steps` would be skipped.
        """
        if self.skips and self._must_skip():
            self._skip(step, optimizer)
            return False
        self._in_a_row = 0
        self._num_taken = {name: count + 1 for name, count in self._num_taken.items()}
        if self.looks:
            self.last_finite = (step, self._step_loss)
        return True

    def has_stepped(self, was_allowed: bool) -> bool:
        """Whether the optimiser took the step: the loss scale of float16 leaves out one whose gradient overflowed.

        Reading the scale makes the host wait for the device, as the scale itself does for most optimisers.
        """
        if self._scaler is None:
            return was_allowed
        before, self._scale = self._scale, self._scaler.get_scale()
        overflowed = before is not None and self._scale < before
        if was_allowed and overflowed:
            self.num_skipped += 1
        return was_allowed and not overflowed

    def _must_skip(self) -> bool:
        trainer = self.task.trainer
        if not self._is_bad and self._scaler is None:  # the scaler looks at the gradient itself
            gradients = [p.grad for p in self.task.net.parameters() if p.grad is not None]
            self._is_bad = not math.isfinite(total_norm(gradients).item())
        if trainer.world_size > 1:
            return bool(trainer.strategy.reduce_boolean_decision(self._is_bad, all=False))
        return self._is_bad

    def _skip(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        self.num_skipped += 1
        self._in_a_row += 1
        limit = self.task.engine.max_skipped_steps
        if self._in_a_row > limit:
            raise TrainingError(
                f"The loss or gradient was not finite in {self._in_a_row} steps in a row, up to step {step}; "
                f"engine.max_skipped_steps allows {limit}. {self._evidence(step, None)}{ADVICE}"
            )
        if self._in_a_row == 1:
            log.warning("Step %d is skipped: %s", step, self._evidence(step, None).rstrip())
        for buffer, before in zip(self.task.net.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        if self._scaler is None:  # which needs to see the gradient, and skips the step by itself
            optimizer.zero_grad(set_to_none=True)

    # ---- where something is read -------------------------------------------------------------------------------

    def check(self) -> None:
        """Reads what the device noted.

        Raises:
            TrainingError: naming the first bad step.
        """
        if self.looks:
            return
        first = self.task.trainer.strategy.reduce(self._first_bad, reduce_op="min")
        step = int(first)
        if step < NEVER:
            raise TrainingError(self._explain("train/loss_step", math.nan, step, None))

    def begin_interval(self, name: str) -> bool:
        """Whether a step was taken since the last time; `name` is "interval" or "epoch"."""
        taken, self._num_taken[name] = self._num_taken[name] > 0, 0
        return taken or not self.skips

    def note(self, step: int, loss: float) -> None:
        """Takes over a mean loss that was read for logging."""
        if not self.looks:
            self.last_finite = (step, loss)

    def check_values(self, values: dict[str, float]) -> None:
        """Looks at losses that were read.

        Raises:
            TrainingError: for the first that is not finite.
        """
        for name, value in values.items():
            if name.endswith(("loss", "loss_step")) and not math.isfinite(value):
                raise TrainingError(self._explain(name, value, self.task.trainer.global_step, None))

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Lets no weights that are not finite into a file.

        Raises:
            TrainingError: naming them.
        """
        self.check()
        # The first process may be the only one that has all weights
        name = self.task.trainer.strategy.broadcast(_first_bad(state_dict))
        if name:
            raise TrainingError(
                f"`{name}` is not finite after step {self.task.trainer.global_step}, so no checkpoint is written and "
                f"training stopped. {self._known()}{ADVICE}"
            )

    # ---- words -------------------------------------------------------------------------------------------------

    def _explain(self, name: str, value: float, step: int, part: Part | None) -> str:
        is_train = name == "train/loss_step"
        where = f" It is micro-batch {part.position + 1} of the step." if part and part.position else ""
        evidence = self._evidence(step, part) if is_train else self._weights()
        given = value if self.looks or not is_train else "not finite"
        return f"`{name}` is {given} at step {step}, so training stopped.{where} {evidence}{self._known()}{ADVICE}"

    def _evidence(self, step: int, part: Part | None) -> str:
        """Which samples, or which weights, are not finite."""
        loader = self.task.trainer.train_dataloader
        batch = part.batch if part else {}
        if isinstance(loader, TensorLoader):
            rows = rows_of_step(loader, step - 1, self.task.engine.accumulate_batches)
            for name, tensor in loader.tensors.items():
                bad = [int(row) for row in rows if not tensor[row].isfinite().all()]
                if bad:
                    shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
                    return f"`{name}` is not finite in training sample(s) {shown} (counted from 0). "
            batch = batch or {name: tensor[rows] for name, tensor in loader.tensors.items()}
        for name, tensor in batch.items():
            if not tensor.isfinite().all():
                return f"`{name}` is not finite after conversion and augmentation, though the samples are. "
        floats = {name: tensor for name, tensor in batch.items() if tensor.is_floating_point() and tensor.numel()}
        sizes = ", ".join(f"|{name}| up to {float(tensor.abs().max()):.4g}" for name, tensor in floats.items())
        return f"The samples are finite{f' ({sizes})' if sizes else ''}. {self._weights()}"

    def _weights(self) -> str:
        named = dict(self.task.net.named_parameters())
        weights = _first_bad(named)
        if weights:
            return f"The weights `net.{weights}` are not finite. "
        gradient = _first_bad({name: p.grad for name, p in named.items() if p.grad is not None})
        return f"The weights are finite{f', the gradient of `net.{gradient}` is not' if gradient else ''}. "

    def _known(self) -> str:
        last = self.last_finite
        folder = getattr(self.task.trainer.checkpoint_callback, "folder", None)
        with suppress(TrainingError):  # of a file that could not be written: then it is not the last good one
            getattr(self.task.trainer.strategy.checkpoint_io, "wait", lambda: None)()
        saved = folder / "last.ckpt" if folder and (folder / "last.ckpt").is_file() else "none yet"
        loss = f"The last finite training loss was {last[1]:.6g} at step {last[0]}. " if last else ""
        return f"{loss}The last good checkpoint: {saved}. "


def rows_of_step(loader: BatchLoader, step: int, accumulate: int) -> Tensor:
    """Which samples of the training split a step (from 0) takes, counted from 0, over all processes."""
    steps = -(-loader.num_batches // accumulate)
    order = epoch_order(loader.num_samples, loader.seed, step // steps, loader.shuffle)
    batches = range(step % steps * accumulate, min((step % steps + 1) * accumulate, loader.num_batches))
    spans = [slice(i * loader.batch_size, i * loader.batch_size + loader.global_length(i)) for i in batches]
    return torch.cat([order[span] for span in spans])


def _first_bad(tensors: dict[str, Any]) -> str | None:
    """The first name whose values are not all finite."""
    found = {n: all_finite(t) for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}
    if not found or bool(torch.stack([flag.cpu() for flag in found.values()]).all()):
        return None
    return next(name for name, flag in found.items() if not flag)
