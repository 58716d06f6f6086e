"""Batches from memory: which rows, in which order, on which rank."""

import itertools
import pickle

import pytest
import torch

from leyden.data.loaders import Batch, TensorLoader
from leyden.data.order import epoch_order


def numbered(num_samples: int) -> Batch:
    return {"row": torch.arange(num_samples), "value": torch.arange(num_samples) * 0.5}


def rows(loader: TensorLoader) -> list[list[int]]:
    return [batch["row"].tolist() for batch in loader]


def test_batches_are_slices_of_the_epochs_order() -> None:
    loader = TensorLoader(numbered(10), batch_size=4, shuffle=True, seed=3)
    loader.set_epoch(2)
    order = epoch_order(10, 3, 2, True).tolist()
    assert rows(loader) == [order[0:4], order[4:8], order[8:10]]
    assert len(loader) == 3


def test_tensors_of_a_batch_belong_together() -> None:
    for batch in TensorLoader(numbered(10), batch_size=4, shuffle=True, seed=0):
        assert batch["value"].equal(batch["row"] * 0.5)


def test_iterating_again_gives_the_same_epoch_until_another_is_set() -> None:
    loader = TensorLoader(numbered(20), batch_size=6, shuffle=True, seed=0)
    first = rows(loader)
    assert rows(loader) == first
    loader.sampler.set_epoch(1)  # as Lightning does it
    assert rows(loader) != first
    loader.set_epoch(0)
    assert rows(loader) == first


def test_without_shuffle_every_epoch_is_in_file_order() -> None:
    loader = TensorLoader(numbered(5), batch_size=2, shuffle=False, seed=0)
    loader.set_epoch(4)
    assert rows(loader) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_every_global_batch(world_size: int, shuffle: bool) -> None:
    whole = TensorLoader(numbered(25), 8, shuffle, seed=1)
    parts = [TensorLoader(numbered(25), 8, shuffle, 1, rank, world_size) for rank in range(world_size)]
    # 25 = 3 * 8 + 1: the last batch has fewer samples than ranks, so training leaves it out and evaluation does not.
    expected = rows(whole)[: 3 if shuffle else 4]
    merged = [list(itertools.chain(*batches)) for batches in zip(*map(rows, parts), strict=True)]
    assert merged == expected


def test_evaluation_on_ranks_counts_every_sample_once() -> None:
    parts = [TensorLoader(numbered(9), 4, False, 0, rank, 2) for rank in range(2)]
    seen = sorted(row for part in parts for batch in rows(part) for row in batch)
    assert seen == list(range(9))
    assert [len(part) for part in parts] == [3, 3]  # equal counts, or the ranks would wait for each other for ever


@pytest.mark.parametrize(
    ("num_samples", "min_last", "dropped"),
    [
        (9, 2, 1),  # 9 = 2 * 4 + 1
        (10, 2, 0),  # the last batch has 2
        (8, 2, 0),  # no rest
        (9, 1, 0),
        (1, 2, 1),  # nothing but a rest
    ],
)
def test_a_last_batch_below_the_minimum_is_dropped(num_samples: int, min_last: int, dropped: int) -> None:
    loader = TensorLoader(numbered(num_samples), 4, True, 0, min_last=min_last)
    assert loader.num_dropped == dropped
    assert sum(map(len, rows(loader))) == num_samples - dropped
    assert len(rows(loader)) == len(loader)


def test_trim_sees_the_cut_batch() -> None:
    loader = TensorLoader(numbered(5), 2, False, 0, trim=lambda batch: {"row": batch["row"] + 100})
    assert rows(loader) == [[100, 101], [102, 103], [104]]


def test_batches_do_not_share_memory_with_the_split() -> None:
    tensors = numbered(4)
    next(iter(TensorLoader(tensors, 4, False, 0)))["row"].fill_(-1)
    assert tensors["row"].tolist() == [0, 1, 2, 3]


def test_pickles() -> None:
    loader = TensorLoader(numbered(7), 2, True, 5)
    assert rows(pickle.loads(pickle.dumps(loader))) == rows(loader)


def test_tensors_of_different_length_are_a_fault_of_the_datamodule() -> None:
    with pytest.raises(AssertionError, match=r"differ in length.*'a': 2.*'b': 3"):
        TensorLoader({"a": torch.zeros(2), "b": torch.zeros(3)}, 1, False, 0)
