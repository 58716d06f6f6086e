"""Samples of a Dataset: random numbers by sample, seeks, failures that name the sample, streams."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from leyden.data import workers
from leyden.data.workers import Samples, StreamLoader, WorkerLoader, as_dict, default_num_workers
from leyden.errors import DataError


class Drawing(Dataset[Any]):
    """A sample's number and what the three generators draw for it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[int, float, float, float]:
        return number, random.random(), float(np.random.rand()), float(torch.rand(()))


class Noting(Drawing):
    """Notes in a list what is read; in this process only."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return super().__getitem__(number)


class Failing(Drawing):
    def __getitem__(self, number: int) -> Any:
        if number == 7:
            raise OSError("cannot identify image file 'x.jpg'")
        return super().__getitem__(number)


class Dying(Drawing):
    def __getitem__(self, number: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    workers.shut_down()


KEYS = ("row", "python", "numpy", "torch")


def make(dataset: Dataset[Any], num_workers: int, seed: int = 5, **options: Any) -> WorkerLoader:
    return WorkerLoader(Samples(dataset, "train", KEYS, seed), 4, True, seed, num_workers, **options)


def drawn(loader: WorkerLoader, epoch: int) -> list[dict[int, list[float]]]:
    loader.set_epoch(epoch)
    return [
        {int(row): [float(batch[key][i]) for key in KEYS[1:]] for i, row in enumerate(batch["row"])} for batch in loader
    ]


def test_dat_11_random_numbers_depend_on_seed_epoch_and_sample_only() -> None:
    expected = drawn(make(Drawing(), 0), 0)
    assert sorted(row for batch in expected for row in batch) == list(range(10))
    assert drawn(make(Drawing(), 1), 0) == expected
    loader = make(Drawing(), 2)
    assert drawn(loader, 0) == expected
    later = {row: values for batch in drawn(loader, 1) for row, values in batch.items()}
    first = {row: values for batch in expected for row, values in batch.items()}
    assert all(later[row] != first[row] for row in range(10))
    assert len({tuple(values) for values in first.values()}) == 10
    assert drawn(make(Drawing(), 0, seed=6), 0) != expected


def test_seek_reads_nothing_of_what_was_before() -> None:
    dataset = Noting()
    whole = drawn(make(Drawing(), 0), 2)
    loader = make(dataset, 0)
    loader.load_state_dict({"batch": 2})
    assert drawn(loader, 2) == whole[2:]
    assert sorted(dataset.read) == sorted(whole[2])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sample_that_cannot_be_read_is_named(num_workers: int) -> None:
    message = (
        r"^Sample 7 of the train data \(Failing\) could not be read: OSError: cannot identify image file 'x\.jpg'$"
    )
    with pytest.raises(DataError, match=message):
        list(make(Failing(), num_workers))


def test_dat_12_worker_that_dies_is_said_with_what_helps() -> None:
    with pytest.raises(DataError, match=r"worker process that reads the data has died.*shared memory.*num_workers=0"):
        list(make(Dying(), 1))


@pytest.mark.parametrize("sample", [5, (1, 2), "abcd"])
def test_sample_of_another_form_is_explained(sample: Any) -> None:
    with pytest.raises(TypeError, match=r"a sample must be a dict, or a tuple \(row, python, numpy, torch\)"):
        as_dict(sample, KEYS)


def test_samples_that_do_not_fit_together_are_said() -> None:
    class Uneven(Drawing):
        def __getitem__(self, number: int) -> Any:
            return {"image": torch.zeros(1, number % 2 + 1)}

    with pytest.raises(DataError, match="samples of a batch do not fit together"):
        list(make(Uneven(), 0))


def test_numbers_come_in_32_bits_but_whole_ones_stay() -> None:
    batch = next(make(Drawing(), 0).batches())
    assert {batch[key].dtype for key in KEYS[1:]} == {torch.float32}
    assert batch["row"].dtype == torch.int64


def test_workers_end_when_they_are_told() -> None:
    loader = make(Drawing(), 2)
    list(loader)
    (iterator,) = workers._running
    processes = list(iterator._workers)
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    assert [len(batch["row"]) for batch in loader] == [4, 4, 2]  # a signal to the whole group stops none
    workers.shut_down()
    assert not any(process.is_alive() for process in processes)
    assert not workers._running


def test_workers_end_with_their_loader() -> None:
    loader = make(Drawing(), 2)
    next(iter(loader))
    processes = [process for iterator in workers._running for process in iterator._workers]
    assert all(process.is_alive() for process in processes)
    started = time.monotonic()
    del loader
    gc.collect()
    assert not any(process.is_alive() for process in processes)
    # torch waits for 5 s for each worker that does not hear of its end
    assert time.monotonic() - started < 5


def test_one_core_is_left_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert default_num_workers() == expected


# ---- streams -----------------------------------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    def __init__(self, length: int, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.length):
            if number == self.bad:
                raise ValueError("no more")
            yield {"row": number}


def stream(length: int, batches: int, num_workers: int = 0, **options: Any) -> StreamLoader:
    bad = options.pop("bad", None)
    return StreamLoader(Counting(length, bad), "train", (), 4, batches, num_workers, **options)


def rows(loader: StreamLoader) -> list[list[int]]:
    return [batch["row"].tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_of_a_stream_go_on_where_the_last_ended_and_start_again_at_its_end(num_workers: int) -> None:
    loader = stream(10, 2, num_workers)
    assert len(loader) == 2
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(loader) == [[8, 9], [0, 1, 2, 3]]
    assert loader.global_lengths(0, [{"row": torch.zeros(2)}]) == [2]


def test_evaluation_starts_a_stream_anew() -> None:
    loader = stream(10, 3, goes_on=False)
    assert rows(loader) == rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_stream_faults() -> None:
    with pytest.raises(DataError, match=r"Sample 5 of the train stream \(Counting\) could not be read: ValueError"):
        rows(stream(10, 3, bad=5))
    with pytest.raises(DataError, match=r"The train stream \(Counting\) is empty"):
        rows(stream(0, 3))
