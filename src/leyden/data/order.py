"""The order of samples and the seeds of random draws, as pure functions of their position."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Mixes numbers and words into one 63-bit seed.

    Seeds of neighbouring steps must not be related, which adding or xor-ing the parts would not ensure.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The order in which an epoch visits the samples.

    It takes 4 bytes a sample; 10 million are drawn in 0.4 s, 100 million in 4 s (one core of a shared Xeon).

    Shape:
        output (num_samples,) int32 (int64 from 2**31 samples on), a permutation of 0 .. num_samples - 1.
    """
    dtype = torch.int32 if num_samples < 2**31 else torch.int64  # which give the same permutation
    if not shuffle:
        return torch.arange(num_samples, dtype=dtype)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


def order_hash(order: Tensor) -> str:
    """A short hash of an order: equal orders have equal ones, whatever hardware, processes or workers take it."""
    return hashlib.blake2b(order.contiguous().numpy().data, digest_size=8).hexdigest()


def rank_slice(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """The contiguous part of a global batch that one rank takes; parts differ by at most one sample."""
    return batch[rank_span(len(batch), rank, world_size)]


def rank_span(length: int, rank: int, world_size: int) -> slice:
    """Which rows of `length` a rank takes."""
    return slice(length * rank // world_size, length * (rank + 1) // world_size)
