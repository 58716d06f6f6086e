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

    Shape:
        output (num_samples,) int64, a permutation of 0 .. num_samples - 1.
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def rank_slice(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """The contiguous part of a global batch that one rank takes; parts differ by at most one sample."""
    start, stop = (len(batch) * part // world_size for part in (rank, rank + 1))
    return batch[start:stop]
