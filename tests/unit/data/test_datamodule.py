"""The base datamodule: one in memory keeps the contract; empty splits, ranks, augmentation, fingerprints."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_contract import DataModuleContract

from leyden.data.datamodule import DataModule, Inputs, stack_column
from leyden.data.loaders import Batch, TensorLoader
from leyden.data.residency import Residency
from leyden.errors import ConfigError, DataError


class Numbers(DataModule):
    """Rows 0 .. n - 1 of each split, as a value and a label."""

    def __init__(self, counts: dict[str, int], batch_size: int = 4, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__(batch_size, seed)
        self.counts = counts
        self.scale = scale

    def load_splits(self) -> dict[str, Batch]:
        self.facts = {"num_classes": 2}
        start = 0
        splits = {}
        for name, count in self.counts.items():
            rows = torch.arange(start, start + count)
            splits[name] = {"input": rows.unsqueeze(1) * self.scale, "label": rows}
            start += count
        return splits

    def read_inputs(self, path: Path) -> Inputs:
        values = [float(line) for line in path.read_text().split()]
        return Inputs([str(value) for value in values], {"input": torch.tensor(values).unsqueeze(1)})


class Jittered(Numbers):
    """Adds noise to training batches."""

    @property
    def has_augmentation(self) -> bool:
        return True

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        if generator is None:
            return batch
        noise = torch.rand(batch["input"].shape, generator=generator)
        return {**batch, "input": batch["input"] + noise}


COUNTS = {"train": 11, "val": 5, "test": 6}


class TestNumbers(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return Numbers(COUNTS, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        path = folder / "inputs.txt"
        path.write_text("\n".join(map(str, data.splits["test"]["input"].flatten().tolist())))
        return path


def set_up(**changes: Any) -> Numbers:
    data = Numbers(**({"counts": COUNTS} | changes))
    data.setup("fit")
    return data


def test_splits_are_loaded_once() -> None:
    data = set_up()
    splits = data.splits
    data.setup("test")
    assert data.splits is splits


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_empty_split_is_an_error(split: str) -> None:
    with pytest.raises(DataError) as caught:
        set_up(counts=COUNTS | {split: 0})
    message = str(caught.value)
    assert f"The {split} split of Numbers is empty." in message
    assert "Check the data path and the sizes of the splits (data.val_frac, data.test_frac)." in message


def test_empty_validation_may_be_asked_for() -> None:
    class WithoutVal(Numbers):
        allows_empty_val = True

    data = WithoutVal(COUNTS | {"val": 0})
    data.setup()
    assert data.val_dataloader() == []
    with pytest.raises(DataError, match="The test split"):
        WithoutVal(COUNTS | {"test": 0}).setup()


def test_loaders_take_the_trainers_rank() -> None:
    data = set_up()
    data.trainer = SimpleNamespace(
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}
        )
    )  # type: ignore[assignment]
    loaders = [data.train_dataloader(), data.val_dataloader()]
    for loader, shuffle in zip(loaders, (True, False), strict=True):
        assert isinstance(loader, TensorLoader)
        assert (loader.rank, loader.world_size, loader.shuffle) == (1, 2, shuffle)


def test_batch_larger_than_the_set_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="leyden")
    data = set_up(counts=COUNTS | {"train": 4})
    assert len(data.train_dataloader()) == 1
    assert caplog.text == ""
    data.batch_size = 5
    assert [len(batch["input"]) for batch in data.train_dataloader()] == [4]
    assert "data.batch_size is 5, but there are only 4 training samples, so an epoch is one batch of 4." in caplog.text


def test_training_samples_left_out_are_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="leyden")
    data = set_up(counts=COUNTS | {"train": 9})
    assert len(data.train_dataloader()) == 3
    assert caplog.text == ""
    data.min_last_train = 2
    assert len(data.train_dataloader()) == 2
    assert "The last 1 training sample(s) of each epoch are left out: too few for a batch of their own." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert len(data.val_dataloader()) == 2  # 5 = 4 + 1: evaluation counts every sample
    assert caplog.text == ""


def test_fingerprint_sees_values_names_shapes_and_types() -> None:
    data = set_up()
    prints = [data.fingerprint()["train"]["hash"]]
    train = data.splits["train"]
    for changed in (
        {"input": train["input"] + 1, "label": train["label"]},
        {"other": train["input"], "label": train["label"]},
        {"input": train["input"].squeeze(1), "label": train["label"]},
        {"input": train["input"].view(torch.int32), "label": train["label"]},  # the same bytes
        {"input": train["input"].flip(0), "label": train["label"]},
    ):
        data.splits["train"] = changed
        prints.append(data.fingerprint()["train"]["hash"])
    assert len(set(prints)) == 6
    # Memory layout is no content.
    data.splits["train"] = {"input": train["input"].flip(0).flip(0), "label": train["label"]}
    assert data.fingerprint()["train"]["hash"] == prints[0]


def test_augmentation_depends_on_seed_step_and_rank_and_happens_in_training_only() -> None:
    data = Jittered(COUNTS, seed=3)
    data.setup()
    batch = {"input": torch.zeros(4, 1), "label": torch.zeros(4, dtype=torch.int64)}

    def augment(step: int = 0, rank: int = 0, training: bool = True, seed: int = 3, epoch: int = 0) -> list[float]:
        data.trainer = None
        loader = data.train_dataloader()
        assert isinstance(loader, TensorLoader)
        loader._next_item = step + 1
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            training=training,
            strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank}),
            train_dataloader=loader,
            current_epoch=epoch,
        )
        data.seed = seed
        return data.on_after_batch_transfer(batch, 0)["input"].flatten().tolist()

    first = augment()
    torch.manual_seed(55)
    assert augment() == first
    assert augment(training=False) == [0.0] * 4
    assert (
        len({tuple(values) for values in (first, augment(step=1), augment(rank=1), augment(seed=4), augment(epoch=1))})
        == 5
    )
    assert batch["input"].eq(0).all()
    data.trainer = None
    assert data.on_after_batch_transfer(batch, 0)["input"].eq(0).all()


def test_description_has_the_path_where_there_is_one() -> None:
    data = Numbers(COUNTS)
    assert data.describe() == "Numbers"
    data.path = "a b/c.csv"  # type: ignore[attr-defined]
    assert data.describe() == "Numbers (a b/c.csv)"


def test_reference_is_kept_as_plain_values() -> None:
    assert DataModule(1, reference={"label": "ridge", "r2": 0.8}).reference == {"label": "ridge", "r2": 0.8}
    assert DataModule(1).reference is None


def test_datamodule_without_inputs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DataModule cannot read inputs from a file\."):
        DataModule(1).read_inputs(tmp_path)


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
def test_columns_are_one_dimensional(values: list[int]) -> None:
    column = stack_column(values, torch.int64)
    assert column.shape == (len(values),)
    assert column.dtype == torch.int64
    assert column.tolist() == values


def test_split_that_does_not_fit_on_the_device_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that split; its batches are the same."""
    data = set_up()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, strategy=strategy)  # type: ignore[assignment]
    monkeypatch.setattr(data, "choose_residency", lambda: Residency("device", "fits"))
    full = {id(data.splits["val"])}
    monkeypatch.setattr(
        "leyden.data.datamodule.place", lambda rows, device, wanted: None if id(rows) in full else dict(rows)
    )
    loaders = {name: data.make_loader(name, shuffle=False) for name in ("train", "val")}
    assert [getattr(loaders[name], "device") for name in ("train", "val")] == [None, torch.device("cpu")]  # noqa: B009
    batches = [batch["label"].tolist() for batch in loaders["val"]]
    assert batches == [[11, 12, 13, 14], [15]]
