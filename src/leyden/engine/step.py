"""One optimiser step: exact global means over micro-batches, accumulated batches and processes.

In pseudocode::

    N = samples of all batches of the step, over all processes
    for batch in batches:                          # accumulation
        for part in micro-batches of the batch:
            loss = mean loss of the part
            backward(loss * (len(part) * world size / N))   # processes are averaged, so this is the global mean
    clip the gradient; set the learning rate; optimiser step

The weights make the gradient that of the mean over all N samples, however they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from leyden.data.loaders import Batch
from leyden.sharding import by_kind, total_norm


@dataclass(frozen=True)
class Part:
    """A micro-batch of one process.

    Attributes:
        batch: its tensors.
        weight: factor of its mean loss in the mean over the whole step.
        position: which micro-batch of the step it is, for seeding.
    """

    batch: Batch
    weight: float
    position: int


def split_step(
    batches: Sequence[Batch],
    global_lengths: Sequence[int],
    micro_batch_size: int | None,
    world_size: int,
    min_last: int = 1,
    in_step: bool = False,
) -> Iterator[Part]:
    """Cuts the batches of a step into micro-batches with their weights.

    Args:
        batches: this process's part of each batch of the step, sample axis first.
        global_lengths: samples of each of these batches over all processes.
        micro_batch_size: largest number of samples at a time on this process; None does not cut.
        world_size: number of processes, whose gradients are averaged.
        min_last: samples that the last micro-batch of a batch takes at least, from the one before where need be.
        in_step: whether all processes need equally many micro-batches, also where one of them has a sample less.
    """
    total = sum(global_lengths)
    position = 0
    for batch, global_length in zip(batches, global_lengths, strict=True):
        length = batch_length(batch)
        size = micro_batch_size or length
        bounds = [*range(0, length, max(1, size)), length]
        if in_step and micro_batch_size is not None:
            count = -(-global_length // (world_size * micro_batch_size))
            bounds = [length * index // count for index in range(count + 1)]
        elif len(bounds) > 2:
            bounds[-2] = min(bounds[-2], length - min_last)
        for start, stop in pairwise(bounds):
            part = batch if stop - start == length else {n: t[start:stop] for n, t in batch.items()}
            yield Part(part, batch_length(part) * world_size / total, position)
            position += 1


def batch_length(batch: Batch) -> int:
    """Number of samples in a batch."""
    return next(iter(batch.values())).shape[0]  # len of a tensor takes ten times as long


def accumulate_gradient(
    parts: Sequence[Part],
    compute: Callable[[Part], Tensor],
    backward: Callable[[Tensor], None],
    hold_back: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Adds up the gradient of the mean loss over all parts.

    Args:
        parts: micro-batches with weights that add up to the world size over all processes.
        compute: the mean loss of a part.
        backward: adds a loss's gradient.
        hold_back: a context in which processes do not exchange gradients; used for all parts but the last.
    """
    assert parts, "a step without samples"
    for index, part in enumerate(parts):
        with nullcontext() if index == len(parts) - 1 else hold_back():
            loss = compute(part)
            backward(loss if part.weight == 1 else loss * part.weight)


def clip_gradient(parameters: Iterable[Tensor], max_norm: float | None, max_value: float | None) -> Tensor | None:
    """Clips in place by the L2 norm of the whole gradient, or each element by value.

    Returns:
        the norm before clipping, on the device, or None where nothing is clipped by norm or there is no gradient.
    """
    if max_norm is None and max_value is None:
        return None
    parameters, norm = [p for p in parameters if p.grad is not None], None
    if not parameters:
        return None  # the step is skipped
    if max_norm is not None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients)
        for kind in by_kind(parameters):
            torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    if max_value is not None:
        for kind in by_kind(parameters):
            torch.nn.utils.clip_grad_value_(kind, max_value)
    return norm
