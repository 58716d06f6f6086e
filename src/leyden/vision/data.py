"""Vision data: digits, the sets of torchvision, and folders of pictures."""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from leyden.data.datamodule import DataModule, Inputs, Loading
from leyden.data.image_changes import (
    Augment,
    BatchChange,
    Filters,
    apply_filters,
    augment_batch,
    filtered_statistics,
    list_augmentations,
    list_filters,
)
from leyden.data.loaders import Batch
from leyden.data.splits import split_problems, split_rows
from leyden.errors import DataError
from leyden.vision.images import SUFFIXES, load_images
from leyden.vision.sets import IMAGE_SETS, image_facts, outline_images

log = logging.getLogger(__name__)

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class ImageData(DataModule):
    """Images in memory as uint8; converted, filtered, augmented and normalised per batch on the device.

    Batches: `image` (B, C, H, W) float32, normalised by mean and deviation of the filtered training images; `label`
    (B,) int64; in training with mixed labels also `label_probability` (B, num_classes) float32. A subclass gives
    `load_images_and_labels`.

    Args:
        batch_size: global batch size.
        seed: of the order of samples and of augmentation.
        augment: random changes of training images, applied in this order on images in 0 .. 1, after the filters.
        reference: a known result for this data.
        filters: changes of all images, in training, evaluation and prediction, applied in this order in 0 .. 1.
        loading: where the data stays and how it is read.
    """

    def __init__(
        self,
        batch_size: Annotated[int, Ge(1)] = 128,
        seed: Annotated[int, Ge(0)] = 0,
        augment: Augment | None = None,
        reference: Mapping[str, Any] | None = None,
        filters: Filters | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, reference, **loading)
        self.filters = list_filters(filters)
        self.augment = list_augmentations(augment)
        self.mean: list[float] = []
        self.std: list[float] = []
        self._scaling: tuple[tuple[Any, ...], Tensor, Tensor] | None = None

    def load_images_and_labels(self) -> tuple[dict[str, Batch], list[str]]:
        """Splits with `image` (N, C, H, W) uint8 and `label` (N,) int64, and the names of the classes."""
        raise NotImplementedError

    def load_splits(self) -> dict[str, Batch]:
        splits, class_names = self.load_images_and_labels()
        train = splits["train"]["image"]
        if len(train):
            self.mean, self.std = (
                filtered_statistics(train, self.filters) if self.filters else channel_statistics(train)
            )
        self.facts = image_facts(train.shape[1], train.shape[-1], class_names)
        return splits

    def _outline(self, counts: dict[str, int], channels: int, size: int, class_names: list[str]) -> dict[str, Batch]:
        self.facts = image_facts(channels, size, class_names)
        self.mean, self.std = [0.0] * channels, [1.0] * channels
        return outline_images(counts, channels, size)

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        image = batch["image"].float()
        scale, shift = self._normalisation(image.device)
        if generator is None and not self.filters:  # to 0 .. 1 and to mean 0 and deviation 1 at once
            return {**batch, "image": image.mul_(scale / 255).sub_(shift)}
        batch = {**batch, "image": apply_filters(image.mul_(1 / 255), self.filters)}
        if generator is not None:
            batch = augment_batch(batch, self.augment, generator, self.facts["num_classes"])
        return {**batch, "image": batch["image"].mul(scale).sub_(shift)}

    def _normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factor and offset (1, C, 1, 1); on the device already, since a copy to it would wait for each batch."""
        wanted = (device, *self.mean, *self.std)
        if self._scaling is None or self._scaling[0] != wanted:
            mean, std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (self.mean, self.std))
            self._scaling = (wanted, 1 / std, mean / std)
        return self._scaling[1:]

    @property
    def has_augmentation(self) -> bool:
        return bool(self.augment)

    @property
    def mixes_labels(self) -> bool:
        return any(isinstance(change, BatchChange) for change in self.augment)

    def read_inputs(self, path: Path) -> Inputs:
        if path.is_dir():
            paths = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        elif path.is_file():
            paths = [path]
        else:
            raise DataError(f"There is no picture or folder {path.absolute()}.")
        if not paths:
            raise DataError(f"There are no pictures in {path.absolute()} (kinds: {', '.join(sorted(SUFFIXES))}).")
        images, _, _ = load_images(
            paths,
            self.facts["in_channels"],
            self.facts["image_size"],
            getattr(self, "background", 255),
            "raise",
        )
        return Inputs([str(file) for file in paths], {"image": images})

    def fitted_state(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std}

    def load_fitted_state(self, state: dict[str, Any]) -> None:
        self.mean, self.std = state["mean"], state["std"]


def channel_statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of uint8 images (N, C, H, W), on the scale 0 .. 1."""
    counts = torch.stack([torch.bincount(c.reshape(-1), minlength=256) for c in images.unbind(dim=1)]).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts * values).sum(dim=1) / counts.sum(dim=1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(dim=1) / counts.sum(dim=1)
    return mean.tolist(), variance.sqrt().clamp(min=1e-6).tolist()


class Digits(ImageData):
    """1,797 handwritten digits of 8 x 8 pixels, split in file order, so that the test has other writers.

    Rows 0 to 1196 are for training, 1197 to 1436 for validation, 1437 to 1796 for the test.

    Source: E. Alpaydin, C. Kaynak 1998, test part of Optical Recognition of Handwritten Digits; comes with
    scikit-learn.
    """

    def load_images_and_labels(self) -> tuple[dict[str, Batch], list[str]]:
        from sklearn.datasets import load_digits

        found = load_digits()
        # The file has ink of 0 .. 16
        images = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
        labels = torch.from_numpy(found.target.astype(np.int64))
        rows = {"train": slice(0, 1197), "val": slice(1197, 1437), "test": slice(1437, None)}
        return {n: {"image": images[r], "label": labels[r]} for n, r in rows.items()}, [str(d) for d in range(10)]


class TorchvisionData(ImageData):
    """MNIST, Fashion-MNIST and CIFAR-10 through torchvision's own classes.

    The last `val_size` rows of the training file are for validation. Fashion-MNIST is also read straight from
    Debian's package dataset-fashion-mnist where that is installed.

    Args:
        dataset: which set.
        root: folder of the files; downloaded there when missing.
        val_size: training rows kept for validation.
        batch_size: global batch size.
        seed: of the order of samples and of augmentation.
        augment: random changes of training images.
        reference: a known result for this data.
        filters: changes of all images, before augmentation.
        loading: where the data stays and how it is read.
    """

    def __init__(
        self,
        dataset: Literal["MNIST", "FashionMNIST", "CIFAR10"],
        root: str,
        val_size: Annotated[int, Ge(0), Le(50_000)] = 5000,
        batch_size: Annotated[int, Ge(1)] = 128,
        seed: Annotated[int, Ge(0)] = 0,
        augment: Augment | None = None,
        reference: Mapping[str, Any] | None = None,
        filters: Filters | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, augment, reference, filters, **loading)
        self.dataset = dataset
        self.root = root
        self.val_size = val_size
        self.allows_empty_val = val_size == 0

    def describe(self) -> str:
        return self.dataset

    def outline(self) -> dict[str, Batch]:
        known = IMAGE_SETS[self.dataset]
        counts = {"train": known.num_train - self.val_size, "val": self.val_size, "test": known.num_test}
        return self._outline(counts, known.in_channels, known.image_size, list(known.class_names))

    def source_paths(self) -> list[Path]:
        folder = {"CIFAR10": "cifar-10-batches-py"}.get(self.dataset, self.dataset)
        return [DEBIAN_FASHION_MNIST if self._from_debian() else Path(self.root) / folder]

    def _from_debian(self) -> bool:
        raw = Path(self.root) / "FashionMNIST" / "raw"
        return self.dataset == "FashionMNIST" and not raw.is_dir() and DEBIAN_FASHION_MNIST.is_dir()

    def prepare_data(self) -> None:
        """Downloads the files unless they are there.

        Raises:
            DataError: saying how to get them by hand.
        """
        if self.splits or self._from_debian():
            return
        try:
            for train in (True, False):
                self._torchvision(train, download=True)
        except (RuntimeError, OSError) as err:
            debian = " On Debian: apt-get install dataset-fashion-mnist." if self.dataset == "FashionMNIST" else ""
            raise DataError(
                f"{self.dataset} is not in {Path(self.root).absolute()} and cannot be downloaded "
                f"({str(err).strip().splitlines()[0]}).{debian} Or put torchvision's files there: "
                f"torchvision.datasets.{self.dataset}('{self.root}', download=True) on a machine with a network, "
                "then copy the folder."
            ) from err

    def _torchvision(self, train: bool, download: bool = False) -> Any:
        import torchvision

        return getattr(torchvision.datasets, self.dataset)(self.root, train=train, download=download)

    def _read(self, train: bool) -> tuple[Tensor, Tensor, list[str]]:
        if self._from_debian():
            prefix = "train" if train else "t10k"
            images = read_idx(DEBIAN_FASHION_MNIST / f"{prefix}-images-idx3-ubyte.gz").unsqueeze(1)
            labels = read_idx(DEBIAN_FASHION_MNIST / f"{prefix}-labels-idx1-ubyte.gz").long()
            import torchvision

            return images, labels, list(torchvision.datasets.FashionMNIST.classes)
        found = self._torchvision(train)
        if self.dataset == "CIFAR10":
            images = torch.from_numpy(found.data.transpose(0, 3, 1, 2).copy())
        else:
            images = found.data.unsqueeze(1)
        return images, torch.as_tensor(found.targets, dtype=torch.int64), list(found.classes)

    def load_images_and_labels(self) -> tuple[dict[str, Batch], list[str]]:
        images, labels, class_names = self._read(train=True)
        if self.val_size >= len(labels):
            raise DataError(f"`data.val_size` is {self.val_size}, but {self.dataset} has {len(labels)} training rows.")
        split = len(labels) - self.val_size
        test_images, test_labels, _ = self._read(train=False)
        return {
            "train": {"image": images[:split], "label": labels[:split]},
            "val": {"image": images[split:], "label": labels[split:]},
            "test": {"image": test_images, "label": test_labels},
        }, class_names


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes as a uint8 tensor of the shape it states.

    Source: the format's description by Y. LeCun et al., http://yann.lecun.com/exdb/mnist/.
    """
    content = gzip.decompress(path.read_bytes())
    num_dims = content[3]
    shape = np.frombuffer(content, ">i4", count=num_dims, offset=4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy())


class ImageFolder(ImageData):
    """Pictures in one folder per class.

    Either `path/train/CLASS/*`, `path/val/CLASS/*` and `path/test/CLASS/*` (val may be missing: then `val_frac` of
    the training pictures), or `path/CLASS/*`, split by `val_frac` and `test_frac`. Class indices come from the
    training classes in alphabetical order, for all splits, and stay in the checkpoint.

    Args:
        path: the folder.
        image_size: pictures are cropped to a centred square and resized to this many pixels.
        in_channels: 1 for grey, 3 for colour, whatever the files have.
        background: grey value (0 .. 255) behind transparent parts.
        on_error: "raise" stops at an unreadable file, "skip" leaves it out and lists it at the end.
        val_frac: share of the pictures for validation where it has no folder; 0 asks for none.
        test_frac: share of the pictures for the test where it has no folder.
        split_seed: of the assignment to splits; equal pictures are never in two splits.
        batch_size: global batch size.
        seed: of the order of samples and of augmentation.
        augment: random changes of training images.
        reference: a known result for this data.
        filters: changes of all images, before augmentation.
        loading: where the data stays and how it is read.
    """

    def __init__(
        self,
        path: str,
        image_size: Annotated[int, Ge(1)] = 32,
        in_channels: Literal[1, 3] = 3,
        background: Annotated[int, Ge(0), Le(255)] = 255,
        on_error: Literal["raise", "skip"] = "raise",
        val_frac: Annotated[float, Ge(0), Lt(1)] = 0.15,
        test_frac: Annotated[float, Ge(0), Lt(1)] = 0.2,
        split_seed: Annotated[int, Ge(0)] = 0,
        batch_size: Annotated[int, Ge(1)] = 64,
        seed: Annotated[int, Ge(0)] = 0,
        augment: Augment | None = None,
        reference: Mapping[str, Any] | None = None,
        filters: Filters | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, augment, reference, filters, **loading)
        self.path = path
        self.image_size, self.in_channels, self.background = image_size, in_channels, background
        self.on_error = on_error
        self.val_frac, self.test_frac, self.split_seed = val_frac, test_frac, split_seed
        self.allows_empty_val = val_frac == 0

    @classmethod
    def config_problems(cls, values: dict[str, Any]) -> list[str]:
        """Rules between keys that their types cannot say; `{key}` stands for the section."""
        return split_problems(values)

    def outline(self) -> dict[str, Batch] | None:
        _, pool = self._list_splits()
        names, counts = sorted({file.parent.name for file in pool}), {"train": len(pool)}
        return self._outline(counts, self.in_channels, self.image_size, names) if len(names) > 1 else None

    def load_images_and_labels(self) -> tuple[dict[str, Batch], list[str]]:
        files = self._list_files()
        class_names = sorted({file.parent.name for file in files["train"]})
        index = {name: position for position, name in enumerate(class_names)}
        for split, paths in files.items():
            unknown = sorted({file.parent.name for file in paths} - set(class_names))
            if unknown:
                counts = ", ".join(f"{n} ({sum(f.parent.name == n for f in paths)} pictures)" for n in unknown)
                raise DataError(
                    f"{self.path}: the {split} split has classes that training does not have: {counts}. "
                    f"Training classes: {', '.join(class_names)}. Remove these folders or add training pictures."
                )
        if len(class_names) < 2:
            raise DataError(
                f"{Path(self.path).absolute()}: found {len(class_names)} classes with pictures for training, 2 or more "
                f"are needed. Expected {self.path}/train/CLASS/*.jpg or {self.path}/CLASS/*.jpg "
                f"(kinds of files: {', '.join(sorted(SUFFIXES))})."
            )
        splits = {}
        for split, paths in files.items():
            images, kept, skipped = load_images(
                paths, self.in_channels, self.image_size, self.background, self.on_error
            )
            self.skipped += skipped
            labels = torch.tensor([index[paths[position].parent.name] for position in kept], dtype=torch.int64)
            splits[split] = {"image": images, "label": labels}
        empty = [name for name in class_names if not (splits["train"]["label"] == index[name]).any()]
        if empty:
            raise DataError(
                f"{self.path}: no training picture of class {', '.join(empty)} can be read. First: {self.skipped[0]}"
            )
        return splits, class_names

    def _list_splits(self) -> tuple[dict[str, list[Path]], list[Path]]:
        """The pictures of each split that has a folder of its own, and those for training and what is split off."""
        root = Path(self.path)
        if not root.is_dir():
            raise DataError(f"There is no folder {root.absolute()}. Check data.path (relative to the current folder).")
        fixed = {split: _pictures(root / split) for split in ("train", "val", "test") if (root / split).is_dir()}
        return fixed, fixed.get("train", [] if fixed else _pictures(root))

    def _list_files(self) -> dict[str, list[Path]]:
        fixed, pool = self._list_splits()
        rows = split_rows(
            [hashlib.blake2b(file.read_bytes()).digest() for file in pool],
            0.0 if "val" in fixed else self.val_frac,
            0.0 if "test" in fixed else self.test_frac,
            self.split_seed,
        )
        return {
            split: fixed[split] if split in fixed and split != "train" else [pool[i] for i in rows[split]]
            for split in ("train", "val", "test")
        }


def _pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*/*") if file.suffix.lower() in SUFFIXES and file.is_file())
