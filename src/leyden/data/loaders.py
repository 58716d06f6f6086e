"""Batches cut from tensors in memory, without per-sample Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from leyden.data.order import epoch_order, rank_slice

Batch = dict[str, Tensor]


class TensorLoader:
    """Iterates over the global batches of one split that lies in memory as tensors.

    The order is a function of (seed, epoch); a rank takes its contiguous part of every global batch.

    Args:
        tensors: name -> tensor with the sample axis first, all of the same length.
        batch_size: samples in a global batch (over all ranks).
        shuffle: whether each epoch has its own order.
        seed: of the order.
        rank: this process among `world_size` processes.
        world_size: processes that share every global batch.
        batches_per_item: several batches may be handed out as one item, a list, so that a training step can take
            many batches; None hands out each batch by itself.
        cuts: batches of the epoch after which an item ends in any case.
        max_batches: batches of an epoch that count; None is all of them.
        trim: cuts what no row of a batch needs (padding), on the host before the batch goes to the device.
        with_index: whether batches also carry `index` (B,), the numbers of their samples in the split.
        min_last: a last batch smaller than this is dropped (BatchNorm cannot train on one sample).
    """

    def __init__(
        self,
        tensors: Batch,
        batch_size: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        min_last: int = 1,
        trim: Callable[[Batch], Batch] | None = None,
        batches_per_item: int | None = None,
        cuts: Iterable[int] = (),
        max_batches: int | None = None,
        with_index: bool = False,
    ) -> None:
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        assert len(set(lengths.values())) == 1, f"tensors of one split differ in length: {lengths}"
        self.tensors = tensors
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.trim = trim
        self.world_size = world_size
        self.num_samples = next(iter(lengths.values()))
        last = self.num_samples % batch_size
        self.num_dropped = last if 0 < last < max(min_last, world_size if shuffle else 1) else 0
        self.with_index = with_index
        self.batches_per_item = batches_per_item
        full = -(-(self.num_samples - self.num_dropped) // batch_size)
        self.num_batches = full if max_batches is None else min(full, max_batches)
        size = batches_per_item or 1
        own = {cut for cut in cuts if 0 < cut < self.num_batches and cut % size}
        # Where items start, and the end of the last one
        self._bounds: Sequence[int] = range(0, self.num_batches + size, size)
        if own or self.num_batches % size:
            self._bounds = sorted({*range(0, self.num_batches, size), *own, self.num_batches})
        self.epoch = 0
        self._next_item = 0
        self._first_item = 0
        # Lightning looks for `sampler.set_epoch` before each epoch, and asks every sampler for its batch sampler.
        self.sampler = self
        self.batch_sampler = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration takes."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def batch_indices(self, item: int) -> range:
        """Which batches of the epoch an item holds."""
        return range(self._bounds[item], self._bounds[item + 1])

    def items_until(self, batch: int) -> int:
        """How many items the first `batch` batches of the epoch are."""
        return bisect_left(self._bounds, batch)

    def global_length(self, index: int) -> int:
        """Samples in a batch of the epoch, over all ranks."""
        return min(self.batch_size, self.num_samples - self.num_dropped - index * self.batch_size)

    def batches(self) -> Iterator[Batch]:
        """The batches of the epoch one by one, however they are handed out."""
        order = epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle)
        return (self._cut(order, index) for index in range(self.num_batches))

    def __iter__(self) -> Iterator[Batch | list[Batch]]:
        first, self._first_item = self._first_item, 0
        order = epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle)
        for item in range(first, len(self)):
            self._next_item = item + 1
            batches = [self._cut(order, index) for index in self.batch_indices(item)]
            yield batches[0] if self.batches_per_item is None else batches

    @property
    def current_item(self) -> int:
        """The item handed out last."""
        return self._next_item - 1

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that were handed out; 0 again after the last one."""
        return self._bounds[self._next_item % len(self)]

    def state_dict(self) -> dict[str, int]:
        """The position in the epoch; Lightning puts it into checkpoints."""
        return {"batch": self.batches_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Lets the next iteration start at a position; nothing is read for what was before."""
        self._first_item = self.items_until(state["batch"])

    def _cut(self, order: Tensor, index: int) -> Batch:
        start = index * self.batch_size
        part = rank_slice(order[start : start + self.global_length(index)], self.rank, self.world_size)
        # An index in brackets would take ten times as long for small rows (torch 2.14 on the CPU)
        cut = {name: tensor.index_select(0, part) for name, tensor in self.tensors.items()}
        if self.with_index:
            cut["index"] = part
        return self.trim(cut) if self.trim else cut
