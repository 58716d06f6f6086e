"""The order in which images of a batch are changed: filters always, then augmentation in training.

Belongs here: what may stand in `data.filters` and `data.augment`, and how it is applied. The changes themselves are in
`filters`, `batch_transforms` and `mixup`, or a user's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from leyden.data.loaders import Batch
from leyden.errors import ConfigError

CHUNK_VALUES = 2**22  # values of images that are filtered at a time, 16 MiB as float32


@runtime_checkable
class BatchChange(Protocol):
    """An augmentation that changes labels as well.

    It gets `image` (B, C, H, W) in [0, 1], `label` (B,) and `label_probability` (B, num_classes), and gives them back
    with as many rows; the loss of training is that of `label_probability`, its metrics that of `label`.
    """

    def change_batch(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Changes a batch; `generator`, on its device, is the only source of randomness."""


Filter = Callable[[Tensor], Tensor]
Augmentation = Callable[[Tensor, torch.Generator], Tensor] | BatchChange
Filters = Mapping[str, Filter | None]
Augment = Mapping[str, Augmentation | None]


def list_filters(filters: Filters | None) -> list[Filter]:
    """The filters that are switched on, in their order.

    Raises:
        ConfigError: for one that draws random numbers or changes labels.
    """
    found = {name: change for name, change in (filters or {}).items() if change is not None}
    for name, change in found.items():
        if isinstance(change, BatchChange) or not takes(change, 1) or getattr(change, "is_random", False):
            raise ConfigError(
                f"`data.filters.{name}` ({type(change).__name__}) is random, but filters are applied to all images, "
                "also in validation and prediction, so they must be the same each time. Put it under "
                f"data.augment.{name}, which is for training images only."
                + (" Or give it one sigma and probability 1." if hasattr(change, "is_random") else "")
            )
    return list(found.values())


def list_augmentations(augment: Augment | None) -> list[Augmentation]:
    """The augmentations that are switched on, in their order.

    Raises:
        ConfigError: for a filter, which would make training images unlike those of validation and prediction.
    """
    found = {name: change for name, change in (augment or {}).items() if change is not None}
    for name, change in found.items():
        if not isinstance(change, BatchChange) and not takes(change, 2):
            raise ConfigError(
                f"`data.augment.{name}` ({type(change).__name__}) takes no random generator: it would change all "
                "training images alike, and no image of validation and prediction. Put it under "
                f"data.filters.{name}, which is for all images."
            )
    return list(found.values())


def takes(change: Any, num_arguments: int) -> bool:
    """Whether a callable can be called with so many arguments; also where it does not say."""
    try:
        inspect.signature(change).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # some built-in callables do not say what they take
        return True
    return True


def apply_filters(image: Tensor, filters: Sequence[Filter]) -> Tensor:
    """Filters image (B, C, H, W), float in [0, 1].

    Raises:
        ConfigError: when a filter gives another shape, which the network is not made for.
    """
    for change in filters:
        filtered = change(image)
        if filtered.shape != image.shape:
            raise ConfigError(
                f"`data.filters`: {type(change).__name__} made images of shape {tuple(filtered.shape)} out of "
                f"{tuple(image.shape)}, but a filter keeps the shape. Change the stored images instead."
            )
        image = filtered
    return image


def augment_batch(
    batch: Batch, augmentations: Sequence[Augmentation], generator: torch.Generator, num_classes: int
) -> Batch:
    """Applies augmentations in their order to a batch with `image` in [0, 1] and `label`.

    The result has `label_probability` (B, num_classes) float32 where an augmentation changes labels.
    """
    if any(isinstance(change, BatchChange) for change in augmentations):
        batch = {**batch, "label_probability": F.one_hot(batch["label"], num_classes).float()}
    for change in augmentations:
        if isinstance(change, BatchChange):
            batch = change.change_batch(batch, generator)
        else:
            batch = {**batch, "image": change(batch["image"], generator)}
    return batch


def filtered_statistics(images: Tensor, filters: Sequence[Filter]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of uint8 images (N, C, H, W) after filters, on the scale 0 .. 1."""
    total = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for chunk in images.split(max(1, CHUNK_VALUES // images[0].numel())):
        values = apply_filters(chunk.float().mul_(1 / 255), filters).double()
        total += torch.stack([values.sum(dim=(0, 2, 3)), values.square().sum(dim=(0, 2, 3))])
    mean, mean_square = total / (images.numel() / images.shape[1])
    variance = (mean_square - mean.square()).clamp(min=0)  # rounding may give less than 0 for a constant channel
    return mean.tolist(), variance.sqrt().clamp(min=1e-6).tolist()
