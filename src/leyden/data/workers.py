"""Batches of a user's Dataset: worker processes read and decode its samples, in Leyden's order."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from leyden.data.loaders import Batch, Batches, BatchLoader
from leyden.data.order import derive_seed
from leyden.errors import DataError

Position = tuple[int, Sequence[int]]  # epoch, sample numbers


@dataclass(frozen=True)
class Failure:
    """A sample that could not be read, as it travels from a worker."""

    message: str


class Samples(Dataset[Any]):
    """A map-style Dataset whose samples come as dicts, with random numbers that depend on the sample alone.

    Before a sample is read, the generators of Python, NumPy and torch are seeded from (seed, epoch, sample): neither
    the number of workers nor where a run was resumed changes an augmentation that draws from them.

    Args:
        dataset: gives a dict, or a tuple of values for `keys`.
        split: its name for messages.
        keys: names of the values where a sample is a tuple.
        seed: of the random numbers.
    """

    def __init__(self, dataset: Dataset[Any], split: str, keys: Sequence[str], seed: int) -> None:
        self.dataset = dataset
        self.split = split
        self.keys = tuple(keys)
        self.seed = seed

    def __getitem__(self, position: Position) -> list[dict[str, Any]] | Failure:
        """The samples of a batch."""
        epoch, numbers = position
        samples = []
        for number in numbers:
            _seed_generators(derive_seed(self.seed, "sample", epoch, number))
            try:
                samples.append(as_dict(self.dataset[number], self.keys))
            except Exception as err:  # whatever a user's code raises is said with the sample's number
                return Failure(
                    f"Sample {number} of the {self.split} data ({type(self.dataset).__name__}) could not be read: "
                    f"{type(err).__name__}: {err}"
                )
        return samples


def as_dict(sample: Any, keys: Sequence[str]) -> dict[str, Any]:
    """A sample as a dict.

    Raises:
        TypeError: where it is neither a dict nor a tuple of as many values as there are keys.
    """
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, tuple | list) and len(sample) == len(keys):
        return dict(zip(keys, sample, strict=True))
    size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
    raise TypeError(f"a sample must be a dict, or a tuple ({', '.join(keys)}); it is a {type(sample).__name__}{size}")


def collate(samples: list[dict[str, Any]] | Failure) -> Batch | Failure:
    """One tensor a key, sample axis first."""
    if isinstance(samples, Failure):
        return samples
    try:
        batch: Batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError) as err:
        return Failure(f"The samples of a batch do not fit together: {err}")
    # Python numbers and NumPy's come in 64 bits
    return {name: t.float() if t.dtype == torch.float64 else t for name, t in batch.items()}


class Rows(Dataset[Batch]):
    """The rows of tensors as a Dataset."""

    def __init__(self, tensors: Batch) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, row: int) -> Batch:
        return {name: tensor[row] for name, tensor in self.tensors.items()}


class _Positions:
    """What the workers are asked for: the epoch and this rank's samples of each batch."""

    def __init__(self, loader: WorkerLoader) -> None:
        self._loader = weakref.ref(loader)  # or the workers that ask this would keep the loader, and it them
        self.first = 0

    def __iter__(self) -> Iterator[Position]:
        loader = self._loader()
        assert loader is not None, "the loader that asks is gone"
        order = loader.epoch_order()
        loader._log_order(order)
        for index in range(self.first, loader.num_batches):
            yield loader.epoch, loader.samples_of(order, index).tolist()


class WorkerLoader(BatchLoader):
    """Batches of a map-style Dataset, read by worker processes.

    Args:
        samples: of the split.
        batch_size, shuffle, seed: as in `BatchLoader`.
        num_workers: processes that read; 0 reads in this one.
        trim: cuts what no row of a batch needs (padding), on the host before the batch goes to the device.
        options: as in `BatchLoader`.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        shuffle: bool,
        seed: int,
        num_workers: int,
        trim: Callable[[Batch], Batch] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(len(samples.dataset), batch_size, shuffle, seed, **options)  # type: ignore[arg-type]
        self.samples = samples
        self.num_workers = num_workers
        self.trim = trim
        self._positions = _Positions(self)
        self._workers: DataLoader[Any] | None = None

    def _batches(self, first: int) -> Iterator[Batch]:
        if self._workers is None:
            self._workers = start_workers(self.samples, self.num_workers, sampler=self._positions)
        self._positions.first = first
        order = self.epoch_order() if self.with_index else None
        for index, batch in enumerate(read(self, self._workers), first):
            if order is not None:
                batch["index"] = self.samples_of(order, index)
            yield self.trim(batch) if self.trim else batch


class StreamLoader(BatchLoader):
    """Batches of an IterableDataset, which alone knows its order and its end.

    A stream that ends starts again. With several processes or workers each must give its own share, as torch asks of
    any IterableDataset (`torch.utils.data.get_worker_info`).

    Args:
        dataset: the stream.
        split: its name for messages.
        keys: names of the values where a sample is a tuple.
        batches_per_epoch: batches that count as an epoch.
        num_workers: processes that read; 0 reads in this one.
        goes_on: whether an epoch starts where the one before ended, and not at the stream's start.
        options: as in `BatchLoader`.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        split: str,
        keys: Sequence[str],
        batch_size: int,
        batches_per_epoch: int,
        num_workers: int,
        goes_on: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(batches_per_epoch * batch_size, batch_size, False, 0, **options)
        self.stream = Stream(dataset, split, tuple(keys))
        self.num_workers = num_workers
        self.goes_on = goes_on
        self._source: Iterator[Batch] = iter(())

    def global_lengths(self, item: int, batches: Sequence[Batch] | Batches) -> list[int]:
        """As long as they are; a stream's last batch may be shorter."""
        return [len(next(iter(batch.values()))) * self.world_size for batch in batches]

    def _batches(self, first: int) -> Iterator[Batch]:
        own = self.rank_length(0)
        if not self.goes_on:
            self._source = iter(())
        for _ in range(first, self.num_batches):
            batch = next(self._source, None)
            if batch is None:
                workers = start_workers(self.stream, self.num_workers, batch_size=own)
                self._source = read(self, workers)
                batch = next(self._source, None)
            if batch is None:
                raise DataError(f"The {self.stream.split} stream ({type(self.stream.dataset).__name__}) is empty.")
            yield batch


class Stream(IterableDataset[Any]):
    """An IterableDataset whose samples come as dicts."""

    def __init__(self, dataset: IterableDataset[Any], split: str, keys: tuple[str, ...]) -> None:
        self.dataset = dataset
        self.split = split
        self.keys = keys

    def __iter__(self) -> Iterator[dict[str, Any] | Failure]:
        number = 0
        try:
            for sample in self.dataset:
                yield as_dict(sample, self.keys)
                number += 1
        except Exception as err:  # whatever a user's code raises is said with the sample's number
            info = get_worker_info()
            where = f" of worker {info.id}" if info is not None else ""
            yield Failure(
                f"Sample {number}{where} of the {self.split} stream ({type(self.dataset).__name__}) "
                f"could not be read: {type(err).__name__}: {err}"
            )


def _collate_stream(samples: list[dict[str, Any] | Failure]) -> Batch | Failure:
    failure = next((sample for sample in samples if isinstance(sample, Failure)), None)
    return failure or collate([sample for sample in samples if not isinstance(sample, Failure)])


def start_workers(
    source: Dataset[Any], num_workers: int, sampler: Any = None, batch_size: int | None = None
) -> DataLoader[Any]:
    """A DataLoader with worker processes that leave the signals of a stop to the process that saves."""
    return DataLoader(
        source,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate if batch_size is None else _collate_stream,
        worker_init_fn=_obey_parent_only,
        persistent_workers=num_workers > 0 and sampler is not None,
    )


def read(loader: BatchLoader, workers: DataLoader[Any]) -> Iterator[Batch]:
    """The batches that workers send; they end with the loader.

    Raises:
        DataError: where a sample cannot be read, or a worker has died.
    """
    iterator = iter(workers)
    if workers.num_workers and iterator not in _running:
        _running.add(iterator)
        # Told to end before the loader's parts are collected in any order: without their queues they would not hear it
        weakref.finalize(loader, iterator._shutdown_workers)  # type: ignore[attr-defined]
    try:
        for batch in iterator:
            if isinstance(batch, Failure):
                raise DataError(batch.message)
            yield batch
    except RuntimeError as err:  # torch says so where a worker was killed
        if "DataLoader worker" not in str(err):
            raise
        raise DataError(
            f"A worker process that reads the data has died: {str(err).splitlines()[0]}. Often memory is short, or "
            "the shared memory (/dev/shm) that batches travel through. Use fewer (data.num_workers), or "
            "data.num_workers=0, which reads in the training process."
        ) from err


# Iterators with processes, which should end with the run and not when they are collected
_running: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def shut_down() -> None:
    """Ends all worker processes."""
    for iterator in list(_running):
        iterator._shutdown_workers()
        _running.discard(iterator)


def default_num_workers() -> int:
    """One process for each core that this one may use, but for the core that trains; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def _obey_parent_only(worker: int) -> None:
    """Lets a worker outlive signals to its whole group: the process that trains needs its data to finish the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes its stack at each call (torch 2.14)
