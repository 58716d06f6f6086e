"""Filters: the values of torchvision, Pillow and scipy, the same bits in any batch, seeded where random."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy import ndimage
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from leyden.config import _check_blocks
from leyden.data.filters import GaussianBlur, Sharpen, SobelEdges, convolve, mirror_index

FIXED: list[Callable[[Tensor], Tensor]] = [GaussianBlur(0.8), GaussianBlur(6.0), SobelEdges(), Sharpen(1.5)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_image(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=seeded(7))


def name_of(change: object) -> str:
    return type(change).__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", [*FIXED, GaussianBlur((0.5, 2.0), 0.5)], ids=name_of)
def test_shape_dtype_and_range_are_kept(change: Callable, dtype: torch.dtype) -> None:
    image = draw_image(9, 3, 10, 6).to(dtype)
    before = image.clone()
    result = change(image, seeded()) if getattr(change, "is_random", False) else change(image)
    assert result.shape == image.shape
    assert result.dtype == dtype
    assert result.min() >= 0
    assert result.max() <= 1
    assert torch.equal(image, before), "the input was changed in place"
    assert not torch.equal(result, image)


@pytest.mark.parametrize("change", FIXED, ids=name_of)
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_an_image_has_the_same_bits_in_any_batch(change: Callable, batch_size: int) -> None:
    image = draw_image(23, 3, 13, 11)
    assert torch.equal(torch.cat([change(part) for part in image.split(batch_size)]), change(image))


@pytest.mark.parametrize("change", FIXED, ids=name_of)
def test_channels_do_not_mix(change: Callable) -> None:
    image = draw_image(4, 3, 9, 9)
    assert torch.equal(change(image)[:, 1:2], change(image[:, 1:2]))


@pytest.mark.parametrize("change", FIXED, ids=name_of)
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 3)])
def test_images_smaller_than_the_kernel(change: Callable, size: tuple[int, int]) -> None:
    assert change(draw_image(2, 1, *size)).isfinite().all()


@pytest.mark.parametrize("change", [*FIXED, GaussianBlur((0.5, 2.0), 0.5)], ids=name_of)
def test_pickle_keeps_the_filter(change: Callable) -> None:
    image, more = draw_image(4, 1, 9, 9), (seeded,) if getattr(change, "is_random", False) else ()
    first, again = change, pickle.loads(pickle.dumps(change))
    assert torch.equal(first(image, *(make() for make in more)), again(image, *(make() for make in more)))


# ---- blur ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.4, 1.0, 1.6])
def test_blur_is_torchvisions(sigma: float) -> None:
    image = draw_image(3, 2, 16, 11).double()
    size = 2 * int(4 * sigma + 0.5) + 1  # the kernel ends at 4 standard deviations
    expected = reference.gaussian_blur(image, [size, size], [sigma, sigma])
    torch.testing.assert_close(GaussianBlur(sigma)(image), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", [3.0, 12.0])
def test_blur_wider_than_the_image_is_scipys(sigma: float) -> None:
    image = draw_image(2, 1, 9, 7).double()
    expected = ndimage.gaussian_filter(image.numpy(), (0, 0, sigma, sigma), mode="mirror")
    np.testing.assert_allclose(GaussianBlur(sigma)(image).numpy(), expected, rtol=0, atol=1e-12)


def test_random_blur_draws_one_sigma_an_image_from_its_range() -> None:
    # A bright row in the middle: the blurred peak is the centre of the kernel, which falls with sigma.
    image = torch.zeros(400, 1, 41, 3)
    image[:, :, 20] = 1
    peak = GaussianBlur((1.0, 3.0))(image, seeded())[:, 0, 20, 1]
    widest, narrowest = (float(GaussianBlur(sigma)(image)[0, 0, 20, 1]) for sigma in (3.0, 1.0))
    assert peak.min() == pytest.approx(widest, abs=0.002)
    assert peak.max() == pytest.approx(narrowest, abs=0.01)
    # The kernel's centre is 1 / (sigma sqrt(2 pi)); sigma is uniform in 1 .. 3: mean 2, standard error 0.03
    sigma = 1 / (peak * (2 * torch.pi) ** 0.5)
    assert float(sigma.mean()) == pytest.approx(2.0, abs=0.1)


def test_random_blur_with_equal_ends_is_the_fixed_one_where_it_applies() -> None:
    image = draw_image(2000, 1, 4, 4)
    result = GaussianBlur((1.2, 1.2), probability=0.25)(image, seeded())
    kept = (result == image).flatten(1).all(dim=1)
    torch.testing.assert_close(result[~kept], GaussianBlur(1.2)(image)[~kept])
    # Standard error sqrt(0.25 * 0.75 / 2000) = 0.0097; 4 of them
    assert float((~kept).float().mean()) == pytest.approx(0.25, abs=0.039)


def test_random_blur_depends_on_the_generator_alone() -> None:
    image, blur = draw_image(16, 1, 9, 9), GaussianBlur((0.5, 2.0), 0.5)
    state = torch.get_rng_state()
    first = blur(image, seeded(3))
    assert torch.equal(blur(image, seeded(3)), first)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert not torch.equal(blur(image, seeded(4)), first)


@pytest.mark.parametrize(
    ("blur", "is_random"),
    [
        (GaussianBlur(1.0), False),
        (GaussianBlur((1.0, 1.0)), False),
        (GaussianBlur((1.0, 2.0)), True),
        (GaussianBlur(1.0, 0.9), True),
    ],
)
def test_blur_knows_whether_it_is_random(blur: GaussianBlur, is_random: bool) -> None:
    assert blur.is_random == is_random


# ---- edges and sharpening --------------------------------------------------------------------------------------


def test_edges_are_scipys() -> None:
    image = draw_image(3, 2, 9, 7).double()
    for channel, result in zip(image.flatten(0, 1).numpy(), SobelEdges()(image).flatten(0, 1).numpy(), strict=True):
        in_x, in_y = (ndimage.sobel(channel, axis=axis, mode="mirror") / 4 for axis in (-1, -2))
        np.testing.assert_allclose(result, np.hypot(in_x, in_y).clip(0, 1), rtol=0, atol=1e-12)


def test_a_straight_edge_is_one_and_even_ground_zero() -> None:
    image = torch.zeros(1, 1, 5, 6)
    image[..., 3:] = 1.0
    # Columns 2 and 3 see 0 on the left and 1 on the right: (1 + 2 + 1) / 4
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]).expand(1, 1, 5, 6)
    assert torch.equal(SobelEdges()(image), expected)
    assert torch.equal(SobelEdges()(image.mT), expected.mT)


@pytest.mark.parametrize("amount", [0.5, 3.0])
def test_sharpening_is_torchvisions_within_the_border(amount: float) -> None:
    image = draw_image(3, 3, 12, 9).double()
    expected = reference.adjust_sharpness(image, 1 + amount)
    inside = (..., slice(1, -1), slice(1, -1))
    torch.testing.assert_close(Sharpen(amount)(image)[inside], expected[inside], rtol=0, atol=1e-12)


def test_sharpening_is_pillows_within_the_border() -> None:
    pixels = (255 * draw_image(12, 9)).round().to(torch.uint8)
    expected = np.asarray(ImageEnhance.Sharpness(Image.fromarray(pixels.numpy())).enhance(2.0))[1:-1, 1:-1]
    result = 255 * Sharpen(1.0)(pixels[None, None] / 255)[0, 0, 1:-1, 1:-1]
    assert np.abs(result.numpy() - expected).max() < 1.01  # Pillow rounds the smoothed and the sharpened pixel


def test_sharpening_of_the_border_mirrors_the_image() -> None:
    image = draw_image(1, 1, 5, 5).double()
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = ndimage.convolve(image[0, 0].numpy(), kernel, mode="mirror")
    expected = (image[0, 0].numpy() + 0.7 * (image[0, 0].numpy() - smooth)).clip(0, 1)
    np.testing.assert_allclose(Sharpen(0.7)(image)[0, 0].numpy(), expected, rtol=0, atol=1e-12)


def test_amount_zero_is_the_identity() -> None:
    image = draw_image(2, 1, 5, 5)
    assert torch.equal(Sharpen(0.0)(image), image)


def test_convolve_and_mirror() -> None:
    # The mirror about the ends of 0 1 2 3, two and more periods of 6 long
    assert mirror_index(4, 7, torch.device("cpu")).tolist() == [1, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 2]
    line = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 1, 4)
    # 2 1 2 4 8 4 in windows of three: the one before, plus ten times the one after
    assert convolve(line, (1.0, 0.0, 10.0), dim=-1).flatten().tolist() == [22.0, 41.0, 82.0, 44.0]


# ---- the check of a config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"_target_": "GaussianBlur", "sigma": 0.0}, "`data.filters.x.sigma` must be greater than 0"),
        ({"_target_": "GaussianBlur", "sigma": 51.0}, "`data.filters.x.sigma` must be less than or equal to 50"),
        ({"_target_": "GaussianBlur", "sigma": [-2.0, 1.0]}, "`data.filters.x.sigma` must be"),
        ({"_target_": "GaussianBlur", "sigma": [1.0, 2.0, 3.0]}, "`data.filters.x.sigma` must be"),
        ({"_target_": "GaussianBlur", "sigma": "wide"}, "`data.filters.x.sigma` must be"),
        (
            {"_target_": "GaussianBlur", "sigma": [2.0, 1.0]},
            "`data.filters.x.sigma` is [2.0, 1.0], but a range goes from the smaller to the larger value.",
        ),
        ({"_target_": "GaussianBlur", "sigma": 1.0, "probability": 1.5}, "`data.filters.x.probability` must be less"),
        ({"_target_": "GaussianBlur"}, "`data.filters.x.sigma` is required"),
        ({"_target_": "Sharpen", "amount": -1.0}, "`data.filters.x.amount` must be greater than or equal to 0"),
        ({"_target_": "SobelEdges", "sigma": 1.0}, "There is no key `data.filters.x.sigma`."),
    ],
)
def test_wrong_settings_are_named(block: dict, problem: str) -> None:
    block = {**block, "_target_": f"leyden.data.filters.{block['_target_']}"}
    problems = list(_check_blocks({"filters": {"x": block}}, "data"))
    assert len(problems) == 1
    assert problems[0].startswith(problem)


@pytest.mark.parametrize("sigma", [1, 1.5, [0.5, 2], [1.0, 1.0]])
def test_right_settings_pass(sigma: object) -> None:
    block = {"_target_": "leyden.data.filters.GaussianBlur", "sigma": sigma, "probability": 0.5}
    assert not list(_check_blocks({"augment": {"x": block}}, "data"))
