"""What is known of sets of pictures without reading a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from leyden.data.loaders import Batch


@dataclass(frozen=True)
class ImageSet:
    """A fixed set of pictures.

    Attributes:
        num_train, num_test: pictures in its two files.
        in_channels: of a picture.
        image_size: its side, in pixels.
        class_names: by class index.
    """

    num_train: int
    num_test: int
    in_channels: int
    image_size: int
    class_names: tuple[str, ...]


# Sources: http://yann.lecun.com/exdb/mnist/, https://github.com/zalandoresearch/fashion-mnist,
# https://www.cs.toronto.edu/~kriz/cifar.html; the names are those of torchvision's classes.
IMAGE_SETS = {
    "MNIST": ImageSet(
        60_000,
        10_000,
        1,
        28,
        (
            "0 - zero",
            "1 - one",
            "2 - two",
            "3 - three",
            "4 - four",
            "5 - five",
            "6 - six",
            "7 - seven",
            "8 - eight",
            "9 - nine",
        ),
    ),
    "FashionMNIST": ImageSet(
        60_000,
        10_000,
        1,
        28,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "CIFAR10": ImageSet(
        50_000,
        10_000,
        3,
        32,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
}


def outline_images(counts: dict[str, int], in_channels: int, image_size: int) -> dict[str, Batch]:
    """Splits of pictures that have shapes but no memory, `counts` of each."""
    return {
        split: {
            "image": torch.empty(count, in_channels, image_size, image_size, dtype=torch.uint8, device="meta"),
            "label": torch.empty(count, dtype=torch.int64, device="meta"),
        }
        for split, count in counts.items()
    }


def image_facts(in_channels: int, image_size: int, class_names: list[str]) -> dict[str, Any]:
    """What a set of pictures fixes for the task and its network."""
    return {
        "num_classes": len(class_names),
        "class_names": class_names,
        "in_channels": in_channels,
        "image_size": image_size,
    }
