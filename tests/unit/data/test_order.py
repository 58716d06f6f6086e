"""The order of samples: permutations that depend on seed and epoch only, and parts that make up a batch."""

import itertools

import pytest
import torch

from leyden.data.order import derive_seed, epoch_order, rank_slice


@pytest.mark.parametrize("num_samples", [0, 1, 2, 17, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_visits_every_sample_once(num_samples: int, shuffle: bool) -> None:
    order = epoch_order(num_samples, seed=0, epoch=3, shuffle=shuffle)
    assert order.dtype == torch.int32
    assert order.sort().values.tolist() == list(range(num_samples))


def test_order_depends_on_seed_and_epoch_only() -> None:
    first = epoch_order(100, seed=5, epoch=2, shuffle=True)
    torch.manual_seed(123)
    torch.rand(7)
    assert epoch_order(100, seed=5, epoch=2, shuffle=True).equal(first)
    orders = {
        tuple(epoch_order(100, seed, epoch, True).tolist()) for seed, epoch in itertools.product(range(10), range(10))
    }
    assert len(orders) == 100  # 100 pairs; two of the 100! orders are equal by chance with probability 1e-154


def test_order_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    epoch_order(10, seed=1, epoch=1, shuffle=True)
    assert torch.rand(3).equal(expected)


def test_without_shuffle_the_order_is_that_of_the_file() -> None:
    assert epoch_order(5, seed=9, epoch=9, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_places_are_uniform_over_seeds() -> None:
    """Sample 0 of 4 lies in each place for a quarter of 4000 seeds: 1000 +- 27.4 = sqrt(4000 * 1/4 * 3/4), 5 sigma."""
    places = [int((epoch_order(4, seed, 0, True) == 0).nonzero()) for seed in range(4000)]
    counts = [places.count(place) for place in range(4)]
    assert all(abs(count - 1000) < 5 * 27.4 for count in counts), counts


@pytest.mark.parametrize("length", [0, 1, 5, 8, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_parts_of_the_ranks_make_up_the_batch(length: int, world_size: int) -> None:
    batch = torch.arange(length) * 10
    parts = [rank_slice(batch, rank, world_size) for rank in range(world_size)]
    assert torch.cat(parts).equal(batch)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_derived_seeds_are_63_bits_and_differ() -> None:
    seeds = [derive_seed(seed, word, step) for seed in range(10) for word in ("order", "split") for step in range(50)]
    assert len(set(seeds)) == 1000  # by chance equal: 1e6 / 2 pairs / 2**63 = 5e-14
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # the top bit is used


def test_derived_seed_separates_its_parts() -> None:
    """1 and 23 are not 12 and 3, and a number is the same as its digits."""
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1, "a") == derive_seed(1, "a")


def test_derived_seed_stays_the_same_from_release_to_release() -> None:
    """`printf %s 0/order/1 | b2sum -l 64` gives 5234ff2e7dfbb7de; the last bit is dropped. Runs resume with it."""
    assert derive_seed(0, "order", 1) == 0x5234FF2E7DFBB7DE >> 1
