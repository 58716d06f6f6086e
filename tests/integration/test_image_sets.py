"""The experiments on torchvision's sets, with torchvision's own classes on small files of the same format."""

from __future__ import annotations

import hashlib
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torchvision

from leyden.vision import data as vision_data


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}i", *values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(root: Path, name: str) -> None:
    generator = np.random.default_rng(0)
    for prefix, rows in (("train", 300), ("t10k", 60)):
        raw = root / name / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte", generator.integers(0, 256, (rows, 28, 28)))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", np.arange(rows) % 10)


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches in torchvision's format; the checksums it expects are those of the small files."""
    generator = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: dict) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(rows: int) -> dict:
        return {
            "data": generator.integers(0, 256, (rows, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(rows)],
        }

    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [write(f"data_batch_{i}", batch(60)) for i in range(1, 6)])
    monkeypatch.setattr(cifar, "test_list", [write("test_batch", batch(60))])
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    filename, md5 = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(cifar, "meta", {"filename": filename, "key": "label_names", "md5": md5})
    archive = root / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    monkeypatch.setattr(cifar, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())


SMALL = ("debug=fast", "data.val_size=50", "data.batch_size=32")


@pytest.mark.parametrize(
    ("experiment", "folder"),
    [
        ("vision_mnist", "MNIST"),
        ("vision_fashion_mnist", "FashionMNIST"),
        ("vision_fashion_mnist_mlp", "FashionMNIST"),
    ],
)
def test_mnist_family(train: Callable, workspace: Path, experiment: str, folder: str) -> None:
    write_mnist(workspace / "data", folder)
    result = train(f"experiment={experiment}", *SMALL)
    assert result.exit_code == 0, result.output
    assert {s: result.record["data"][s]["num_samples"] for s in ("train", "val", "test")} == {
        "train": 250,
        "val": 50,
        "test": 60,
    }
    assert (result.folder / "pictures" / "confusion_matrix.png").is_file()


def test_cifar10(train: Callable, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(workspace / "data", monkeypatch)
    result = train("experiment=vision_cifar10", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.record["data"]["train"]["num_samples"] == 250


def test_debian_package_of_fashion_mnist(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    write_mnist(workspace / "plain", "FashionMNIST")
    debian = workspace / "debian"
    debian.mkdir()
    for path in (workspace / "plain" / "FashionMNIST" / "raw").iterdir():
        (debian / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(vision_data, "DEBIAN_FASHION_MNIST", debian)
    arguments = {"dataset": "FashionMNIST", "val_size": 50}
    from_debian = vision_data.TorchvisionData(root="nowhere", **arguments)
    from_files = vision_data.TorchvisionData(root="plain", **arguments)
    for data in (from_debian, from_files):
        data.prepare_data()
        data.setup()
    assert from_debian.fingerprint() == from_files.fingerprint()


@pytest.mark.parametrize("experiment", ["vision_mnist", "vision_fashion_mnist", "vision_cifar10"])
def test_neither_files_nor_network(train: Callable, monkeypatch: pytest.MonkeyPatch, experiment: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Error downloading")

    monkeypatch.setattr(vision_data, "DEBIAN_FASHION_MNIST", Path("/nowhere"))
    monkeypatch.setattr(vision_data.TorchvisionData, "_torchvision", refuse)
    result = train(f"experiment={experiment}", *SMALL)
    assert result.exit_code == 1
    assert "cannot be downloaded" in result.output
    assert "on a machine with a network, then copy the folder" in result.output
    assert "Traceback" not in result.output
    assert ("apt-get install dataset-fashion-mnist" in result.output) == ("fashion" in experiment)
