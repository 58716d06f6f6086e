"""What every datamodule keeps to. A datamodule's test inherits the class and says how to build one.

class TestDigits(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return Digits(batch_size=64, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyden.config import FACTS
from leyden.data.datamodule import SPLITS, DataModule
from leyden.data.loaders import Batch, TensorLoader


class DataModuleContract:
    """Batches, splits, order, fingerprint, fitted state and inputs for prediction."""

    def build(self, folder: Path, seed: int) -> DataModule:
        """A datamodule with the run's seed; files it reads are written to `folder` (the same for all seeds)."""
        raise NotImplementedError

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        """Writes the inputs of the test split, in its order and without targets, as a user's file or folder."""
        raise NotImplementedError

    # ---- fixtures ------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("data")

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, folder: Path) -> DataModule:
        return set_up(cls().build(folder, seed=0))

    @pytest.fixture
    def data(self, shared: DataModule) -> Iterator[DataModule]:
        """The datamodule; no test may change it."""
        before = shared.fingerprint()
        yield shared
        assert shared.fingerprint() == before

    # ---- batches -------------------------------------------------------------------------------------------

    def test_batches_are_dicts_of_tensors_of_one_length(self, data: DataModule) -> None:
        for split in SPLITS:
            lengths = []
            for batch in batches(data, split):
                assert set(batch) == set(data.splits["train"])
                assert data.label_key in batch
                assert {tensor.dtype for tensor in batch.values()} <= {torch.float32, torch.int64}
                assert len({len(tensor) for tensor in batch.values()}) == 1
                assert all(tensor.isfinite().all() for tensor in batch.values())
                lengths.append(len(batch[data.label_key]))
            assert sum(lengths) == data.num_samples(split)
            assert all(length == data.batch_size for length in lengths[:-1])

    def test_outline_says_what_reading_finds(self, folder: Path, data: DataModule) -> None:
        built = self.build(folder, seed=0)
        outline = built.outline()
        if outline is None:
            assert type(built).outline is DataModule.outline
            return
        found, read = outline["train"], data.splits["train"]
        assert {n: (t.shape[1:], t.dtype, t.device.type) for n, t in found.items()} == {
            n: (t.shape[1:], t.dtype, "meta") for n, t in read.items()
        }
        assert built.facts.keys() == data.facts.keys()
        for name, value in data.facts.items():
            if name == "class_names":  # small files of a known set may have others
                assert len(built.facts[name]) == len(value)
            elif name not in ("target_mean", "target_std"):  # for which values are needed
                assert built.facts[name] == value, name

    def test_row_alone_equals_row_in_batch(self, data: DataModule) -> None:
        batch = next(batches(data, "test"))
        for row in range(min(3, len(batch[data.label_key]))):
            alone = cut(data, "test", row, row + 1)
            for name, tensor in alone.items():
                expected = batch[name][row : row + 1]
                if expected.ndim > 1 and expected.shape != tensor.shape:  # padding of longer rows
                    assert expected[:, tensor.shape[1] :].eq(0).all()
                    expected = expected[:, : tensor.shape[1]]
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0)

    def test_splits_are_never_changed_by_reading_them(self, data: DataModule) -> None:
        before = data.fingerprint()
        for split in SPLITS:
            for batch in batches(data, split):
                for tensor in batch.values():
                    tensor.zero_()
        assert data.fingerprint() == before

    # ---- splits and order ----------------------------------------------------------------------------------

    def test_no_input_is_in_two_splits(self, data: DataModule) -> None:
        seen: dict[bytes, str] = {}
        for split in SPLITS:
            inputs = [tensor for name, tensor in data.splits[split].items() if name != data.label_key]
            for row in range(data.num_samples(split)):
                content = b"".join(tensor[row].numpy().tobytes() for tensor in inputs)
                assert seen.setdefault(content, split) == split, f"row {row} of {split} is also in {seen[content]}"
        assert set(seen.values()) >= {"train", "test"}

    def test_splits_do_not_depend_on_the_seed_of_the_run(self, data: DataModule, folder: Path) -> None:
        assert set_up(self.build(folder, seed=1)).fingerprint() == data.fingerprint()

    def test_training_order_is_a_function_of_seed_and_epoch(self, data: DataModule) -> None:
        first = epochs(data, range(6))
        torch.manual_seed(17)
        assert epochs(data, range(6)).equal(first)
        assert epochs(data, [3])[0].equal(first[3])  # without the epochs before
        assert not first[1:].equal(first[:-1])
        other = copy.copy(data)
        other.seed = data.seed + 1
        assert not epochs(other, range(6)).equal(first)
        # Every epoch has every row once.
        ascending = first.sort(dim=1).values
        assert ascending[1:].equal(ascending[:-1])

    @pytest.mark.parametrize("split", ["val", "test"])
    def test_evaluation_is_in_file_order(self, data: DataModule, split: str) -> None:
        loader = loader_of(data, split)
        if isinstance(loader, TensorLoader):
            loader.set_epoch(5)
        seen = [label for batch in loader for label in batch[data.label_key].flatten().tolist()]
        assert seen == data.splits[split][data.label_key].flatten().tolist()

    # ---- facts, fingerprint, state -------------------------------------------------------------------------

    def test_facts_are_known_to_the_config(self, data: DataModule) -> None:
        assert set(data.facts) <= FACTS
        assert data.facts

    def test_fingerprint_is_that_of_the_content(self, data: DataModule, folder: Path) -> None:
        again = set_up(self.build(folder, seed=0))
        assert again.fingerprint() == data.fingerprint()
        assert data.fingerprint()["train"]["num_samples"] == data.num_samples("train")
        label = again.splits["test"][data.label_key]
        label[0] += 1
        changed = {split for split in SPLITS if again.fingerprint()[split] != data.fingerprint()[split]}
        assert changed == {"test"}

    def test_state_goes_through_a_file_of_plain_values(self, data: DataModule, folder: Path) -> None:
        fresh = self.restored(data, folder)
        assert fresh.splits == {}
        assert fresh.facts == data.facts
        assert fresh.state_dict() == data.state_dict()
        test = {name: tensor[:5] for name, tensor in data.splits["test"].items()}
        for name, tensor in fresh.transform_batch(test, None).items():
            torch.testing.assert_close(tensor, data.transform_batch(test, None)[name], rtol=0, atol=0)

    def test_inputs_need_no_target_and_give_the_tensors_of_the_split(
        self, data: DataModule, folder: Path, tmp_path: Path
    ) -> None:
        path = self.write_inputs(data, tmp_path)
        inputs = self.restored(data, folder).read_inputs(path)
        test = {name: tensor for name, tensor in data.splits["test"].items() if name != data.label_key}
        assert set(inputs.tensors) == set(test)
        assert len(inputs.ids) == len(set(inputs.ids)) == data.num_samples("test")
        for name, tensor in data.trim_batch(inputs.tensors).items():
            torch.testing.assert_close(tensor, data.trim_batch(test)[name], rtol=0, atol=0)

    def test_pickles(self, data: DataModule) -> None:
        assert pickle.loads(pickle.dumps(data)).fingerprint() == data.fingerprint()

    def restored(self, data: DataModule, folder: Path) -> DataModule:
        """A fresh datamodule that has only read the state of `data` from a checkpoint."""
        file = io.BytesIO()
        torch.save(data.state_dict(), file)
        file.seek(0)
        fresh = self.build(folder, seed=0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        return fresh


def set_up(data: DataModule) -> DataModule:
    """Loads the splits."""
    data.prepare_data()
    data.setup("fit")
    return data


def loader_of(data: DataModule, split: str) -> TensorLoader | list:
    """The loader that the trainer gets."""
    return {"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[split]()


def batches(data: DataModule, split: str) -> Iterator[Batch]:
    """The batches of the first epoch as the task sees them."""
    for batch in loader_of(data, split):
        yield data.on_after_batch_transfer(batch, 0)


def cut(data: DataModule, split: str, start: int, stop: int) -> Batch:
    """Some rows of a split as a batch of their own."""
    rows = {name: tensor[start:stop] for name, tensor in data.splits[split].items()}
    return data.on_after_batch_transfer(data.trim_batch(rows), 0)


def epochs(data: DataModule, numbers: Iterable[int]) -> Tensor:
    """The training targets of some epochs in their order, one row an epoch."""
    loader = loader_of(data, "train")
    assert isinstance(loader, TensorLoader)
    rows = []
    for number in numbers:
        loader.sampler.set_epoch(number)  # as Lightning does it
        rows.append(torch.cat([batch[data.label_key] for batch in loader]).flatten())
    return torch.stack(rows)
