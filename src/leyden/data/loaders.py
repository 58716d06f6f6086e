"""Batches of a split in an order that depends on (seed, epoch) alone; from tensors without per-sample Python."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from leyden.data.order import epoch_order, order_hash, rank_slice, rank_span
from leyden.data.transfer import copy_ahead

# Goes to order.log of the run folder
log = logging.getLogger("leyden.order")

Batch = dict[str, Tensor]


class Batches:
    """Several batches of one item, each made when it is taken: it is then used while the processor's cache holds it.

    Args:
        count: how many.
        make: gives the batch with a number from 0 on.
        num_samples: of all of them.
        source: the batches that these are made from, if any.
    """

    def __init__(
        self, count: int, make: Callable[[int], Batch], num_samples: int, source: Batches | None = None
    ) -> None:
        self.count = count
        self.make = make
        self.num_samples = num_samples
        self.source = source or self

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: slice) -> list[Batch]:
        return [self.make(index) for index in range(*key.indices(self.count))]

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make, range(self.count))

    def map(self, change: Callable[[int, Batch], Batch]) -> Batches:
        """The same batches with a change, which gets the number of each as well."""
        return Batches(self.count, lambda index: change(index, self.make(index)), self.num_samples, self)


class BatchLoader:
    """Iterates over the global batches of one split.

    The order is a function of (seed, epoch); a rank takes its contiguous part of every global batch. A subclass gives
    `_batches`: how the samples of a batch are had.

    Args:
        num_samples: of the split.
        batch_size: samples in a global batch (over all ranks).
        shuffle: whether each epoch has its own order.
        seed: of the order.
        rank: this process among `world_size` processes.
        world_size: processes that share every global batch.
        min_last: a last batch smaller than this is dropped (BatchNorm cannot train on one sample).
        batches_per_item: several batches may be handed out as one item, a list, so that a training step can take
            many batches; None hands out each batch by itself.
        cuts: batches of the epoch after which an item ends in any case.
        max_batches: batches of an epoch that count; None is all of them.
        with_index: whether batches also carry `index` (B,), the numbers of their samples in the split.
        device: where batches are needed; they are copied ahead to a CUDA device. None: where they are.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        min_last: int = 1,
        batches_per_item: int | None = None,
        cuts: Iterable[int] = (),
        max_batches: int | None = None,
        with_index: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.num_samples = num_samples
        last = num_samples % batch_size
        self.num_dropped = last if 0 < last < max(min_last, world_size if shuffle else 1) else 0
        self.with_index = with_index
        self.batches_per_item = batches_per_item
        self.device = device
        full = -(-(num_samples - self.num_dropped) // batch_size)
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

    def _batches(self, first: int) -> Iterator[Batch]:
        """The batches of the epoch one by one, from one of them on."""
        raise NotImplementedError

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

    def rank_length(self, index: int) -> int:
        """Samples in a batch of the epoch on this rank."""
        span = rank_span(self.global_length(index), self.rank, self.world_size)
        return int(span.stop - span.start)

    def global_lengths(self, item: int, batches: Sequence[Batch] | Batches) -> list[int]:
        """Samples in each batch of an item, over all ranks."""
        return [self.global_length(index) for index in self.batch_indices(item)]

    def epoch_order(self) -> Tensor:
        """The order of the epoch."""
        return epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle)

    def samples_of(self, order: Tensor, index: int) -> Tensor:
        """Which samples this rank takes of a batch of the epoch."""
        start = index * self.batch_size
        batch = order[start : start + self.global_length(index)]
        return batch if self.world_size == 1 else rank_slice(batch, self.rank, self.world_size)

    def batches(self) -> Iterator[Batch]:
        """The batches of the epoch one by one, however they are handed out."""
        return self._batches(0)

    def __iter__(self) -> Iterator[Batch | list[Batch] | Batches]:
        first, self._first_item = self._first_item, 0
        for item, batches in enumerate(self._items(first), first):
            self._next_item = item + 1
            yield batches

    def _items(self, first: int) -> Iterator[Batch | list[Batch] | Batches]:
        """What is handed out in an epoch, from one item on."""
        batches = self._batches(self._bounds[first])
        items: Iterator[list[Batch]] = (
            list(islice(batches, len(self.batch_indices(item)))) for item in range(first, len(self))
        )
        if self.device is not None and self.device.type == "cuda":
            items = copy_ahead(items, self.device)
        for group in items:
            yield group[0] if self.batches_per_item is None else group

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

    def _log_order(self, order: Tensor) -> None:
        if self.shuffle and self.rank == 0 and log.handlers:
            log.info("epoch %d: %d samples, hash %s", self.epoch, len(order), order_hash(order))


class TensorLoader(BatchLoader):
    """Batches of a split that lies as tensors in memory, on the device, or in memory-mapped files.

    Args:
        tensors: name -> tensor with the sample axis first, all of the same length and in one place.
        batch_size, shuffle, seed, rank, world_size, min_last: as in `BatchLoader`.
        trim: cuts what no row of a batch needs (padding), on the host before the batch goes to the device.
        options: as in `BatchLoader`.
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
        **options: object,
    ) -> None:
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        assert len(set(lengths.values())) == 1, f"tensors of one split differ in length: {lengths}"
        num_samples = next(iter(lengths.values()))
        super().__init__(num_samples, batch_size, shuffle, seed, rank, world_size, min_last, **options)  # type: ignore[arg-type]
        self.tensors = tensors
        self.trim = trim

    def _items(self, first: int) -> Iterator[Batch | list[Batch] | Batches]:
        if self.batches_per_item is None or (self.device is not None and self.device.type != "cpu"):
            yield from super()._items(first)  # batches that have to be copied to the device
            return
        order = self._place_order()
        for item in range(first, len(self)):
            indices = self.batch_indices(item)
            yield Batches(len(indices), partial(self._make, order, indices.start), sum(map(self.rank_length, indices)))

    def _make(self, order: Tensor, start: int, index: int) -> Batch:
        return self._cut(order, start + index)

    def _place_order(self) -> Tensor:
        order = self.epoch_order()
        self._log_order(order)
        return order.to(next(iter(self.tensors.values())).device)

    def _batches(self, first: int) -> Iterator[Batch]:
        order = self._place_order()
        return (self._cut(order, index) for index in range(first, self.num_batches))

    def _cut(self, order: Tensor, index: int) -> Batch:
        rows = self.samples_of(order, index)
        # An index in brackets would take ten times as long for small rows (torch 2.14 on the CPU)
        cut = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        if self.with_index:
            cut["index"] = rows
        return self.trim(cut) if self.trim else cut
