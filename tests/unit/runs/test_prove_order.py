"""What counts as a fault of the order; and that each is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch, BatchLoader, TensorLoader
from leyden.errors import ConfigError
from leyden.runs.prove_order import Epoch, OrderProof, parse_kinds, parse_ranks, prove_order


class Counted(DataModule):
    def load_splits(self) -> dict[str, Batch]:
        rows = {"input": torch.arange(23).float()[:, None], "label": torch.arange(23)}
        return {"train": rows, "val": rows, "test": rows}


class Broken(Counted):
    """Its loaders are spoiled by a function."""

    spoil: Callable[[TensorLoader], Any]

    def make_loader(self, *arguments: Any, **options: Any) -> BatchLoader | list[Any]:
        loader = super().make_loader(*arguments, **options)
        assert isinstance(loader, TensorLoader)
        self.spoil(loader)
        return loader


def set_up(data: DataModule) -> DataModule:
    data.setup()
    return data


def test_all_ways_of_reading_are_equal() -> None:
    proof = prove_order(set_up(Counted(5)), (1, 2, 3), None, epochs=2)
    assert len(proof.epochs) == 4 * 2 * 3
    assert proof.all_exact
    assert {epoch.num_samples for epoch in proof.epochs} == {23}
    with (console := Console(width=80)).capture() as capture:
        console.print(proof.table())
    text = capture.get()
    assert "workers" in text
    assert proof.epochs[0].order[:8] in text  # not cut off in a narrow terminal
    assert "NO" not in text


def shift(loader: TensorLoader) -> None:
    loader.seed += loader.world_size  # an order that depends on the number of processes


def lose(loader: TensorLoader) -> None:
    if loader.rank:
        loader.samples_of = lambda order, index: torch.empty(0, dtype=torch.int32)  # type: ignore[method-assign]


def repeat(loader: TensorLoader) -> None:
    loader.world_size, loader.rank = 1, 0  # every rank takes the whole batch


def change(loader: TensorLoader) -> None:
    if loader.world_size > 1:
        loader.trim = lambda batch: {**batch, "input": batch["input"] + 1}


@pytest.mark.parametrize(
    ("spoil", "missing", "repeated", "same_order", "same_values"),
    [
        (shift, False, False, False, False),
        (lose, True, False, False, False),
        (repeat, False, True, False, False),
        (change, False, False, True, False),
    ],
)
def test_broken_loader_is_found(spoil: Any, missing: bool, repeated: bool, same_order: bool, same_values: bool) -> None:
    data = Broken(5)
    data.spoil = spoil
    proof = prove_order(set_up(data), (1, 2), ("host",), epochs=1)
    one, two = proof.epochs
    assert not proof.all_exact
    assert proof.is_exact(one)
    assert not proof.is_exact(two)
    assert (two.missing > 0, two.repeated > 0) == (missing, repeated)
    assert (one.order == two.order, one.content == two.content) == (same_order, same_values)


def test_equal_epochs_are_no_shuffling() -> None:
    epoch = Epoch("host", 1, 0, 4, order="a", content="b")
    assert OrderProof([epoch, replace(epoch, number=1, order="c")]).all_exact
    assert not OrderProof([epoch, replace(epoch, number=1)]).all_exact
    assert not OrderProof([]).all_exact


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "-1"])
def test_ranks_are_whole_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ranks is .*; give whole numbers from 1 on"):
        parse_ranks(text)
    assert parse_ranks("1, 4") == [1, 4]


def test_places_are_known_words() -> None:
    assert parse_kinds("mmap, host") == ["mmap", "host"]
    assert parse_kinds(None) is None
    with pytest.raises(ConfigError, match="--residencies is gpu; choose from device, host, mmap, workers"):
        parse_kinds("gpu")
