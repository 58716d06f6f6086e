"""Processes that agree on a step before they exchange its gradients.

A process that runs out of memory must not leave the others waiting in the exchange of gradients. So nothing is
exchanged during the backward pass: each process first says on the host whether it has its gradient. That is a
collective of a few numbers between the hosts (gloo), and no device is waited for: memory runs out on the host, when it
asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from leyden.errors import ConfigError

BUCKET_BYTES = 25 * 2**20  # as much as torch's DistributedDataParallel exchanges at a time


@dataclass(frozen=True)
class Agreement:
    """What all processes know of a step.

    Attributes:
        failed: whether memory ran out on any of them.
        largest: samples in the largest micro-batch of all of them.
        has_gradient: of each parameter, whether any of them has a gradient.
    """

    failed: bool
    largest: int
    has_gradient: list[bool]


class Exchange:
    """The collectives of a step. All processes have to make it, in the same place."""

    def __init__(self) -> None:
        self._group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def agree(self, failed: bool, largest: int, parameters: Sequence[nn.Parameter] = ()) -> Agreement:
        """Tells all processes of this one, and this one of all."""
        said = torch.tensor([failed, largest, *(p.grad is not None for p in parameters)], dtype=torch.int64)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        anyone, most, *has_gradient = said.tolist()
        return Agreement(bool(anyone), most, [bool(has) for has in has_gradient])

    def average(self, parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool]) -> None:
        """Replaces each gradient by its mean over all processes; one that this process lacks counts as zero.

        Raises:
            ConfigError: for sparse gradients.
        """
        gradients: list[Tensor] = []
        for parameter, has in zip(parameters, has_gradient, strict=True):
            if not has:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.layout != torch.strided:
                raise ConfigError(
                    "`engine.micro_batch_size` is auto, which exchanges gradients between processes as dense numbers, "
                    "but the network has sparse gradients. Use engine.micro_batch_size=null, or sparse=False in the "
                    "network's embeddings."
                )
            gradients.append(parameter.grad)
        for bucket in into_buckets(gradients):
            flat = _flatten_dense_tensors(bucket).div_(dist.get_world_size())
            dist.all_reduce(flat)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def into_buckets(tensors: Sequence[Tensor], num_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Tensors in their order, in groups of one number format that take up to `num_bytes` (or are one tensor)."""
    buckets: list[list[Tensor]] = []
    room, dtype = 0, None
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != dtype:
            buckets.append([])
            room, dtype = num_bytes, tensor.dtype
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
