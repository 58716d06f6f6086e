"""Splits: every row in one of them, equal rows in the same, the same for every run."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from leyden.data.splits import split_problems, split_rows


@pytest.mark.parametrize(
    ("num_rows", "val_frac", "test_frac", "sizes"),
    [
        # val = round(n * val_frac), test = round(n * test_frac), train = the rest
        (100, 0.15, 0.2, (65, 15, 20)),
        (7, 0.15, 0.2, (5, 1, 1)),  # 1.05 -> 1, 1.4 -> 1
        (3, 0.0, 0.0, (3, 0, 0)),
        (10, 0.0, 0.5, (5, 0, 5)),
        (0, 0.15, 0.2, (0, 0, 0)),
    ],
)
def test_sizes(num_rows: int, val_frac: float, test_frac: float, sizes: tuple[int, int, int]) -> None:
    splits = split_rows(range(num_rows), val_frac, test_frac, seed=0)
    assert tuple(len(splits[name]) for name in ("train", "val", "test")) == sizes
    assert sorted(itertools.chain(*splits.values())) == list(range(num_rows))


def test_rows_are_ascending_and_mixed() -> None:
    splits = split_rows(range(100), 0.15, 0.2, seed=0)
    assert all(rows == sorted(rows) for rows in splits.values())
    assert splits["test"] != list(range(20))
    assert splits["test"] != list(range(80, 100))


@pytest.mark.parametrize("seed", range(5))
def test_equal_keys_are_never_in_two_splits(seed: int) -> None:
    keys: Sequence[object] = [f"car {row % 13}" for row in range(60)]
    splits = split_rows(keys, 0.2, 0.2, seed)
    where: dict[object, set[str]] = {}
    for name, rows in splits.items():
        for row in rows:
            where.setdefault(keys[row], set()).add(name)
    assert len(where) == 13
    assert all(len(names) == 1 for names in where.values())
    # A split stops to take groups once it has 12 rows, and a group has 4 or 5.
    assert 12 <= len(splits["test"]) <= 16
    assert 12 <= len(splits["val"]) <= 16


def test_split_depends_on_its_seed_only() -> None:
    first = split_rows(range(50), 0.2, 0.2, seed=0)
    torch.manual_seed(99)
    assert split_rows(range(50), 0.2, 0.2, seed=0) == first
    assert split_rows(range(50), 0.2, 0.2, seed=1) != first


@pytest.mark.parametrize(("val_frac", "test_frac"), [(0.5, 0.5), (0.9, 0.2), (0, 1)])
def test_shares_that_leave_no_training_row_are_a_problem(val_frac: float, test_frac: float) -> None:
    (problem,) = split_problems({"val_frac": val_frac, "test_frac": test_frac})
    assert problem.format(key="data") == (
        "`data.val_frac` and `data.test_frac` together must be below 1, or no row is left for training."
    )


@pytest.mark.parametrize("values", [{"val_frac": 0.5, "test_frac": 0.49}, {}, {"val_frac": None, "test_frac": "None"}])
def test_other_shares_are_not(values: dict) -> None:
    assert split_problems(values) == []
