"""Image data: digits, torchvision's file formats, folders of pictures; batches on a known scale."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_contract import DataModuleContract
from PIL import Image
from torch import Tensor

from leyden.data.batch_transforms import RandomFlip
from leyden.data.datamodule import DataModule
from leyden.data.filters import Sharpen, SobelEdges
from leyden.data.mixup import Mixup
from leyden.errors import DataError
from leyden.vision import data as vision_data
from leyden.vision.data import Digits, ImageFolder, TorchvisionData, channel_statistics, read_idx


def draw_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_pictures(images: Tensor, folder: Path) -> Path:
    """Writes images (N, C, H, W) uint8 as PNG files whose names sort in their order."""
    target = folder / "pictures"
    target.mkdir()
    for row, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        Image.fromarray(image.squeeze()).save(target / f"{row:04d}.png")
    return target


def write_classes(folder: Path, counts: dict[str, int], size: int = 6, seed: int = 0) -> None:
    for index, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row in range(count):
            Image.fromarray(draw_pixels(size, size, 3, seed=1000 * seed + 100 * index + row)).save(
                folder / name / f"{row}.png"
            )


def write_idx(path: Path, values: np.ndarray) -> None:
    """Magic number (0, 0, 8 for bytes, dimensions), sizes as big-endian int32, bytes."""
    head = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}i", *values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(head + values.tobytes()))


def write_mnist(folder: Path, dataset: str = "MNIST", num_train: int = 30, num_test: int = 10) -> None:
    """Small files in the format and under the names of the original ones."""
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        raw = folder / dataset / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte.gz", draw_pixels(count, 28, 28, seed=count))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            path = raw / f"{prefix}-{name}"
            path.write_bytes(gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()))


class TestDigits(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return Digits(batch_size=100, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)

    def test_rows_are_the_published_ones_in_file_order(self, data: DataModule) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        assert [data.num_samples(split) for split in ("train", "val", "test")] == [1197, 240, 360]
        labels = torch.cat([data.splits[split]["label"] for split in ("train", "val", "test")])
        assert labels.tolist() == found.target.tolist()
        image = data.splits["train"]["image"][0, 0]
        assert image.max() == 239  # ink of 15 out of 16: 15 * 255 / 16 = 239.06
        assert image.float().mul(16 / 255).round().tolist() == found.images[0].tolist()
        assert data.facts["num_classes"] == 10
        assert (data.facts["in_channels"], data.facts["image_size"]) == (1, 8)


class TestMnist(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        if not (folder / "MNIST").exists():
            write_mnist(folder)
        return TorchvisionData("MNIST", str(folder), val_size=8, batch_size=6, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)

    def test_validation_is_the_end_of_the_training_file(self, data: DataModule) -> None:
        assert [data.num_samples(split) for split in ("train", "val", "test")] == [22, 8, 10]
        assert data.splits["val"]["label"].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]  # rows 22 .. 29 of row % 10
        assert data.splits["val"]["image"][0, 0].numpy().tolist() == draw_pixels(30, 28, 28, seed=30)[22].tolist()


class TestCifar10(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        batches = folder / "cifar-10-batches-py"
        if not batches.exists():
            batches.mkdir()
            for index, name in enumerate([f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]):
                pixels = draw_pixels(4, 3072, seed=index)
                content = {"data": pixels, "labels": [index, 1, 2, 3]}
                (batches / name).write_bytes(pickle.dumps(content))
            (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
        return NoChecksums("CIFAR10", str(folder), val_size=4, batch_size=6, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)

    def test_channels_come_first(self, data: DataModule) -> None:
        # The file has a row of 1024 red, 1024 green, 1024 blue values per picture.
        expected = draw_pixels(4, 3072, seed=5).reshape(4, 3, 32, 32)
        assert data.splits["test"]["image"].numpy().tolist() == expected.tolist()
        assert data.splits["train"]["label"].tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 2, 1, 2, 3, 3, 1, 2, 3]
        assert data.facts["class_names"] == list("abcdefghij")


class NoChecksums(TorchvisionData):
    """Reads small files in CIFAR-10's format, which have other checksums than the original."""

    def prepare_data(self) -> None: ...

    def _torchvision(self, train: bool, download: bool = False) -> Any:
        import torchvision

        class Small(torchvision.datasets.CIFAR10):
            def _check_integrity(self) -> bool:
                return True

            def _load_meta(self) -> None:
                self.classes = list("abcdefghij")

        return Small(self.root, train=train, download=download)


class TestImageFolderWithSplits(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        for number, split in enumerate(("train", "val", "test")):
            if not (folder / split).exists():
                write_classes(folder / split, {"cat": 4, "dog": 3}, seed=number)
        return ImageFolder(str(folder), image_size=6, batch_size=3, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)

    def test_classes_are_the_folders_in_alphabetical_order(self, data: DataModule) -> None:
        assert data.facts["class_names"] == ["cat", "dog"]
        for split in ("train", "val", "test"):
            assert sorted(data.splits[split]["label"].tolist()) == [0, 0, 0, 0, 1, 1, 1]


class TestImageFolderOfClasses(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        if not (folder / "a").exists():
            write_classes(folder, {"a": 12, "b": 12})
            # The same picture once more: it must not be in two splits.
            (folder / "b" / "copy.png").write_bytes((folder / "b" / "3.png").read_bytes())
        return ImageFolder(
            str(folder), image_size=6, in_channels=1, batch_size=7, seed=seed, val_frac=0.2, test_frac=0.2
        )

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)

    def test_sizes(self, data: DataModule) -> None:
        # round(25 * 0.2) = 5; a group of two equal pictures may make a split one larger
        assert data.num_samples("test") in (5, 6)
        assert data.num_samples("val") in (5, 6)
        assert sum(data.num_samples(split) for split in ("train", "val", "test")) == 25


def test_batches_are_normalised_by_the_training_images() -> None:
    data = Digits()
    data.setup()
    batch = data.transform_batch(data.splits["train"], None)
    assert float(batch["image"].mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(batch["image"].std(correction=0)) == pytest.approx(1.0, abs=1e-5)


def test_channel_statistics_are_numpys() -> None:
    pixels = draw_pixels(5, 3, 4, 4)
    mean, std = channel_statistics(torch.from_numpy(pixels))
    assert mean == pytest.approx((pixels / 255).mean(axis=(0, 2, 3)).tolist())
    assert std == pytest.approx((pixels / 255).std(axis=(0, 2, 3)).tolist())


def test_constant_channel_is_not_divided_by_zero() -> None:
    mean, std = channel_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8))
    assert mean == pytest.approx([0.2])  # 51 / 255
    assert std == [1e-6]


def test_augmentation_comes_before_normalisation_and_only_with_a_generator() -> None:
    data = Digits(augment={"flip": RandomFlip(1.0), "off": None})
    data.setup()
    assert data.has_augmentation
    assert not Digits(augment={"off": None}).has_augmentation
    rows = {name: tensor[:4] for name, tensor in data.splits["train"].items()}
    plain = data.transform_batch(rows, None)["image"]
    flipped = data.transform_batch(rows, torch.Generator().manual_seed(0))["image"]
    torch.testing.assert_close(flipped, plain.flip(-1))


class TestFilteredDigits(DataModuleContract):
    """All of the contract also with filters: an image has the same bits alone, in a batch and from a file."""

    def build(self, folder: Path, seed: int) -> DataModule:
        return Digits(batch_size=64, seed=seed, filters={"sharp": Sharpen(1.0), "off": None, "edges": SobelEdges()})

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_pictures(data.splits["test"]["image"], folder)


def test_batches_are_normalised_by_the_filtered_training_images() -> None:
    data, plain = Digits(filters={"edges": SobelEdges()}), Digits()
    data.setup()
    plain.setup()
    assert data.mean != plain.mean
    image = data.transform_batch(data.splits["train"], None)["image"]
    assert float(image.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(image.std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    test = data.splits["test"]
    expected = (SobelEdges()(test["image"].float() * (1 / 255)) - data.mean[0]) / data.std[0]
    torch.testing.assert_close(data.transform_batch(test, None)["image"], expected, rtol=0, atol=1e-5)


def test_filters_come_before_augmentation_which_is_for_training_only() -> None:
    data = Digits(filters={"sharp": Sharpen(2.0)}, augment={"flip": RandomFlip(1.0)})
    data.setup()
    rows = {name: tensor[:4] for name, tensor in data.splits["train"].items()}
    filtered = data.transform_batch(rows, None)["image"]
    flipped = data.transform_batch(rows, torch.Generator().manual_seed(0))["image"]
    torch.testing.assert_close(flipped, filtered.flip(-1))
    assert not data.mixes_labels
    assert not Digits(filters={"sharp": Sharpen(2.0)}).has_augmentation


def test_mixup_adds_label_probability_to_training_batches_only() -> None:
    data = Digits(augment={"flip": RandomFlip(), "mixup": Mixup(1.0)})
    data.setup()
    assert data.mixes_labels
    rows = {name: tensor[:32] for name, tensor in data.splits["train"].items()}
    assert set(data.transform_batch(rows, None)) == {"image", "label"}
    mixed = data.transform_batch(rows, torch.Generator().manual_seed(0))
    assert mixed["label_probability"].shape == (32, 10)
    torch.testing.assert_close(mixed["label_probability"].sum(dim=1), torch.ones(32))
    assert torch.equal(mixed["label"], mixed["label_probability"].argmax(dim=1))
    assert (mixed["label_probability"] > 0).sum(dim=1).max() == 2


@pytest.mark.parametrize("make", [lambda **k: TorchvisionData("MNIST", "x", **k), lambda **k: ImageFolder("x", **k)])
def test_every_kind_of_image_data_has_filters(make: Callable[..., Any]) -> None:
    sharpen = Sharpen(1.0)
    assert make(filters={"sharp": sharpen, "off": None}).filters == [sharpen]


def test_idx_files_of_any_shape(tmp_path: Path) -> None:
    for shape in ((3, 4, 5), (7,)):
        values = draw_pixels(*shape)
        write_idx(tmp_path / "x.gz", values)
        assert read_idx(tmp_path / "x.gz").tolist() == values.tolist()


def test_debians_package_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "debian", "set")
    monkeypatch.setattr(vision_data, "DEBIAN_FASHION_MNIST", tmp_path / "debian" / "set" / "raw")
    data = TorchvisionData("FashionMNIST", str(tmp_path / "empty"), val_size=5)
    data.prepare_data()  # downloads nothing
    data.setup()
    assert not (tmp_path / "empty").exists()
    assert data.splits["test"]["image"][:, 0].numpy().tolist() == draw_pixels(10, 28, 28, seed=10).tolist()
    assert data.facts["class_names"][9] == "Ankle boot"


def test_failed_download_says_how_to_get_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network\nmore")

    monkeypatch.setattr(vision_data, "DEBIAN_FASHION_MNIST", tmp_path / "not there")
    monkeypatch.setattr(TorchvisionData, "_torchvision", refuse)
    with pytest.raises(DataError) as caught:
        TorchvisionData("FashionMNIST", str(tmp_path)).prepare_data()
    message = str(caught.value)
    assert f"FashionMNIST is not in {tmp_path} and cannot be downloaded (no network)." in message
    assert "apt-get install dataset-fashion-mnist" in message
    assert f"torchvision.datasets.FashionMNIST('{tmp_path}', download=True) on a machine with a network" in message
    with pytest.raises(DataError) as caught:
        TorchvisionData("CIFAR10", str(tmp_path)).prepare_data()
    assert "apt-get" not in str(caught.value)


def test_validation_larger_than_the_file(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=r"`data\.val_size` is 30, but MNIST has 30 training rows"):
        TorchvisionData("MNIST", str(tmp_path), val_size=30).setup()


def test_validation_may_be_empty_when_asked_for(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = TorchvisionData("MNIST", str(tmp_path), val_size=0)
    data.setup()
    assert data.val_dataloader() == []
    assert data.describe() == "MNIST"


# ---- folders that do not fit --------------------------------------------------------------------------------


def message_of(data: DataModule) -> str:
    with pytest.raises(DataError) as caught:
        data.setup()
    return str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    message = message_of(ImageFolder(str(tmp_path / "nope")))
    assert f"There is no folder {tmp_path / 'nope'}. Check data.path" in message


def test_class_that_training_does_not_have(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"cat": 2, "dog": 2})
    write_classes(tmp_path / "test", {"cat": 1, "fox": 3}, seed=1)
    message = message_of(ImageFolder(str(tmp_path), val_frac=0.0))
    assert "the test split has classes that training does not have: fox (3 pictures)" in message
    assert "Training classes: cat, dog. Remove these folders or add training pictures." in message


@pytest.mark.parametrize("counts", [{}, {"cat": 3}])
def test_fewer_than_two_classes(tmp_path: Path, counts: dict[str, int]) -> None:
    write_classes(tmp_path, counts)
    message = message_of(ImageFolder(str(tmp_path), val_frac=0.0, test_frac=0.0))
    assert f"{tmp_path}: found {len(counts)} classes with pictures for training, 2 or more are needed." in message
    assert f"Expected {tmp_path}/train/CLASS/*.jpg or {tmp_path}/CLASS/*.jpg" in message
    assert ".webp" in message


def test_damaged_picture_stops_or_is_left_out(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"cat": 3, "dog": 3})
    write_classes(tmp_path / "test", {"cat": 1, "dog": 1}, seed=1)
    damaged = tmp_path / "train" / "cat" / "1.png"
    damaged.write_bytes(b"not a picture")
    message = message_of(ImageFolder(str(tmp_path), val_frac=0.0))
    assert f"{damaged} cannot be read as a picture" in message
    assert "use data.on_error=skip to leave such files out" in message
    data = ImageFolder(str(tmp_path), val_frac=0.0, on_error="skip")
    data.setup()
    assert sorted(data.splits["train"]["label"].tolist()) == [0, 0, 1, 1, 1]
    assert len(data.splits["train"]["image"]) == 5
    (skipped,) = data.skipped
    assert str(damaged) in skipped


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    data = Digits()
    data.setup()
    with pytest.raises(DataError, match=r"There is no picture or folder .*nope"):
        data.read_inputs(tmp_path / "nope")
    with pytest.raises(DataError, match=r"There are no pictures in .*kinds: .*\.png"):
        data.read_inputs(tmp_path)


def test_one_picture_is_an_input(tmp_path: Path) -> None:
    data = Digits()
    data.setup()
    Image.fromarray(draw_pixels(8, 8)).save(tmp_path / "one.png")
    inputs = data.read_inputs(tmp_path / "one.png")
    assert inputs.ids == [str(tmp_path / "one.png")]
    assert inputs.tensors["image"][0, 0].numpy().tolist() == draw_pixels(8, 8).tolist()
