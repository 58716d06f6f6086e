"""What may be a filter and what an augmentation, and in which order they are applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leyden.data import image_changes
from leyden.data.batch_transforms import RandomFlip
from leyden.data.filters import GaussianBlur, Sharpen, SobelEdges
from leyden.data.image_changes import (
    apply_filters,
    augment_batch,
    filtered_statistics,
    list_augmentations,
    list_filters,
)
from leyden.data.loaders import Batch
from leyden.data.mixup import Mixup
from leyden.errors import ConfigError


def halve(image: Tensor) -> Tensor:
    return image / 2


def shift(image: Tensor, generator: torch.Generator) -> Tensor:
    return image + torch.rand(1, generator=generator)


class Relabel:
    """A user's own: halves the images and gives all rows class 1."""

    def change_batch(self, batch: Batch, generator: torch.Generator) -> Batch:
        probability = torch.zeros_like(batch["label_probability"])
        probability[:, 1] = 1
        return {**batch, "image": batch["image"] / 2, "label_probability": probability}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("change", [Mixup(1.0), RandomFlip(), shift, GaussianBlur((1.0, 2.0)), GaussianBlur(1.0, 0.5)])
def test_what_is_random_is_no_filter(change: Callable) -> None:
    with pytest.raises(ConfigError) as caught:
        list_filters({"off": None, "mine": change})
    message = str(caught.value)
    assert message.startswith(f"`data.filters.mine` ({type(change).__name__}) is random, but filters are applied to")
    assert "Put it under data.augment.mine, which is for training images only." in message
    assert ("one sigma and probability 1" in message) == isinstance(change, GaussianBlur)
    assert list_augmentations({"mine": change, "off": None}) == [change]


@pytest.mark.parametrize("change", [SobelEdges(), Sharpen(1.0), halve, torch.square])
def test_what_is_not_random_is_no_augmentation(change: Callable) -> None:
    assert list_filters({"mine": change, "off": None}) == [change]
    if change is torch.square:  # does not say what it takes
        return
    with pytest.raises(ConfigError) as caught:
        list_augmentations({"mine": change})
    message = str(caught.value)
    assert message.startswith(f"`data.augment.mine` ({type(change).__name__}) takes no random generator")
    assert "Put it under data.filters.mine, which is for all images." in message


def test_blur_and_modules_may_be_both() -> None:
    for change in (GaussianBlur(1.0), nn.Identity()):
        assert list_filters({"x": change}) == list_augmentations({"x": change}) == [change]


def test_filters_are_applied_in_their_order() -> None:
    image = torch.full((1, 1, 2, 2), 0.5)
    assert float(apply_filters(image, [halve, torch.square]).mean()) == 0.0625  # (0.5 / 2)^2
    assert float(apply_filters(image, [torch.square, halve]).mean()) == 0.125  # 0.5^2 / 2


def test_filter_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`data\.filters`: function made images of shape \(2, 1, 4, 4\) out of"):
        apply_filters(torch.rand(2, 3, 4, 4), [lambda image: image.mean(dim=1, keepdim=True)])


def test_labels_become_probabilities_only_where_something_changes_them() -> None:
    batch = {"image": torch.ones(2, 1, 2, 2), "label": torch.tensor([2, 0])}
    assert set(augment_batch(batch, [RandomFlip()], seeded(), 3)) == {"image", "label"}
    result = augment_batch(batch, [shift, Relabel(), shift], seeded(), 3)
    assert result["label_probability"].tolist() == [[0, 1, 0], [0, 1, 0]]
    first, second = torch.rand(1, generator=(generator := seeded())), torch.rand(1, generator=generator)
    torch.testing.assert_close(result["image"], ((1 + first) / 2 + second).expand(2, 1, 2, 2))
    assert batch["image"].eq(1).all()


@pytest.mark.parametrize("chunk_values", [1, 100, 10**6])
def test_statistics_are_those_of_all_filtered_images(chunk_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_changes, "CHUNK_VALUES", chunk_values)
    images = torch.randint(0, 256, (11, 3, 6, 5), generator=seeded(), dtype=torch.uint8)
    mean, std = filtered_statistics(images, [SobelEdges(), halve])
    filtered = halve(SobelEdges()(images.float() * (1 / 255))).double()
    assert mean == pytest.approx(filtered.mean(dim=(0, 2, 3)).tolist(), rel=1e-9)
    assert std == pytest.approx(filtered.std(dim=(0, 2, 3), correction=0).tolist(), rel=1e-9)
    # Edges of even pictures are 0 everywhere, which must not be divided by
    assert filtered_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8), [SobelEdges()]) == ([0.0], [1e-6])
