"""Mixup: images and labels mixed by the same share, shares from Beta(alpha, alpha), all from one generator."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from leyden.config import _check_blocks
from leyden.data.loaders import Batch
from leyden.data.mixup import Mixup, draw_beta, draw_log_gamma

NUM_DRAWS = 100_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_batch(num_rows: int, num_classes: int = 5) -> Batch:
    """Images whose pixels are 0 but for one that tells the row."""
    label = torch.randint(num_classes, (num_rows,), generator=seeded(1))
    return {
        "image": torch.eye(num_rows).view(num_rows, 1, 1, num_rows),
        "label": label,
        "label_probability": F.one_hot(label, num_classes).float(),
        "index": torch.arange(num_rows),
    }


def test_image_and_label_are_mixed_by_the_same_share() -> None:
    batch = draw_batch(64)
    mixed = Mixup(1.0).change_batch(batch, seeded())
    # A row of `image` says what part of which image it has, so it gives the labels by arithmetic
    parts = mixed["image"].view(64, 64)
    torch.testing.assert_close(parts.sum(dim=1), torch.ones(64))
    assert ((parts > 0).sum(dim=1) <= 2).all()
    torch.testing.assert_close(mixed["label_probability"], parts @ batch["label_probability"])
    torch.testing.assert_close(mixed["label_probability"].sum(dim=1), torch.ones(64))
    # Each image is the partner of one other, and has a share of its own
    torch.testing.assert_close((parts > 0).sum(), torch.tensor(64 + (parts.diagonal() < 1).sum().item()))
    assert len(parts.diagonal().unique()) > 50


def test_label_is_the_class_of_the_larger_share() -> None:
    batch = draw_batch(64)
    mixed = Mixup(1.0).change_batch(batch, seeded())
    parts = mixed["image"].view(64, 64)
    assert torch.equal(mixed["label"], batch["label"][parts.argmax(dim=1)])
    assert not torch.equal(mixed["label"], batch["label"])


def test_shapes_types_and_other_tensors_are_kept() -> None:
    batch = draw_batch(7)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    mixed = Mixup(0.4).change_batch(batch, seeded())
    assert {n: (t.shape, t.dtype) for n, t in mixed.items()} == {n: (t.shape, t.dtype) for n, t in batch.items()}
    assert torch.equal(mixed["index"], batch["index"])
    assert all(torch.equal(batch[name], before[name]) for name in batch), "the input was changed in place"
    assert mixed["image"].min() >= 0
    assert mixed["image"].max() <= 1


def test_one_image_stays_as_it_is() -> None:
    batch = draw_batch(1)
    mixed = Mixup(1.0).change_batch(batch, seeded())
    assert all(torch.equal(mixed[name], batch[name]) for name in batch)


def test_result_depends_on_the_generator_alone() -> None:
    batch, mixup = draw_batch(16), Mixup(0.3)
    state = torch.get_rng_state()
    first = mixup.change_batch(batch, seeded(3))["image"]
    again = pickle.loads(pickle.dumps(mixup)).change_batch(batch, seeded(3))["image"]
    assert torch.equal(again, first)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert not torch.equal(mixup.change_batch(batch, seeded(4))["image"], first)


# ---- the distribution ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 1.0, 2.0, 100.0])
def test_shares_have_the_moments_of_beta(alpha: float) -> None:
    share = draw_beta(alpha, NUM_DRAWS, seeded()).double()
    assert share.isfinite().all()
    assert share.min() >= 0
    assert share.max() <= 1
    # Mean 1/2, variance 1 / (4 (2 alpha + 1)); 5 standard errors
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = stats.beta(alpha, alpha).stats("k").item() + 3
    assert float(share.mean()) == pytest.approx(0.5, abs=5 * (variance / NUM_DRAWS) ** 0.5)
    assert float(share.var()) == pytest.approx(variance, rel=5 * ((fourth - 1) / NUM_DRAWS) ** 0.5)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 1.0, 2.0, 100.0])
def test_shares_have_the_distribution_of_beta(alpha: float) -> None:
    share = draw_beta(alpha, NUM_DRAWS, seeded(1)).double().numpy()
    at = np.concatenate([[1e-4, 1e-3], np.linspace(0.01, 0.99, 99)])  # float32 rounds shares near 1, so no K-S test
    found = np.searchsorted(np.sort(share), at, side="right") / NUM_DRAWS
    # Kolmogorov's bound: in 999 of 1000 cases the largest difference is below 1.95 / sqrt(n)
    assert np.abs(found - stats.beta.cdf(at, alpha, alpha)).max() < 1.95 / NUM_DRAWS**0.5


@pytest.mark.parametrize("shape", [0.1, 1.0, 7.5])
def test_gamma_is_scipys(shape: float) -> None:
    drawn = draw_log_gamma(shape, (2, NUM_DRAWS // 2), seeded()).double().flatten().numpy()
    assert stats.kstest(drawn, "loggamma", (shape,)).pvalue > 0.001


def test_two_images_are_equally_likely_to_have_the_larger_share() -> None:
    # Independent shares: of 2 x 100,000 the correlation has standard error 0.003
    share: Tensor = draw_beta(0.5, 2 * NUM_DRAWS, seeded()).view(2, -1)
    assert abs(float(torch.corrcoef(share)[0, 1])) < 0.015


@pytest.mark.parametrize("alpha", [0.0, -1.0, 101.0, "much", None])
def test_wrong_alpha_is_named(alpha: object) -> None:
    problems = list(_check_blocks({"augment": {"m": {"_target_": "leyden.data.mixup.Mixup", "alpha": alpha}}}, "data"))
    assert len(problems) == 1
    assert problems[0].startswith("`data.augment.m.alpha` must be ")
