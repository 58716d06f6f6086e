"""Splitting rows into train, val and test so that no row, nor its duplicate, is in two splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from leyden.data.order import derive_seed


def split_rows(keys: Sequence[object], val_frac: float, test_frac: float, seed: int) -> dict[str, list[int]]:
    """Assigns rows to splits; rows with equal keys stay together.

    Args:
        keys: one hashable key per row, e.g. the row's own content, so that duplicates cannot leak.
        val_frac: share of the rows for validation, 0 .. 1.
        test_frac: share of the rows for the test, 0 .. 1.
        seed: of the assignment; it is not the seed of the run, so that all runs share one split.

    Returns:
        "train", "val", "test" -> ascending row numbers.
    """
    groups: dict[object, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    members = list(groups.values())
    generator = torch.Generator().manual_seed(derive_seed(seed, "split"))
    order = torch.randperm(len(members), generator=generator).tolist()
    wanted = {"test": round(len(keys) * test_frac), "val": round(len(keys) * val_frac)}
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for group in order:
        name = next((name for name, size in wanted.items() if len(splits[name]) < size), "train")
        splits[name].extend(members[group])
    return {name: sorted(rows) for name, rows in splits.items()}


def split_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems of the sizes of splits in a data section."""
    shares = [values.get("val_frac"), values.get("test_frac")]
    numbers = [share for share in shares if isinstance(share, int | float)]
    if sum(numbers) >= 1:
        return ["`{key}.val_frac` and `{key}.test_frac` together must be below 1, or no row is left for training."]
    return []
