"""Batch augmentations: no change at strength 0, one draw an image, reproducible, known values."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leyden.data.batch_transforms import (
    Cutout,
    GaussianNoise,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    compute_affine_theta,
)

Transform = Callable[[Tensor, torch.Generator], Tensor]

STRONG: list[Transform] = [
    RandomAffine(degrees=20.0, translate_frac=0.2, scale_frac=0.2, shear_degrees=10.0),
    RandomAffine(degrees=0.0, translate_frac=0.2, scale_frac=0.0, shear_degrees=0.0),
    RandomCrop(padding=3),
    RandomFlip(),
    Cutout(size=3),
    GaussianNoise(std=0.2),
]
NEUTRAL: list[Transform] = [
    RandomAffine(degrees=0.0, translate_frac=0.0, scale_frac=0.0, shear_degrees=0.0),
    RandomCrop(padding=0),
    RandomFlip(probability=0.0),
    Cutout(size=0),
    GaussianNoise(std=0.0),
]


def name_of(transform: Transform) -> str:
    return type(transform).__name__


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_image(*shape: int) -> Tensor:
    """Draws values in [0.1, 1], so that a 0 in the result is a blank and never a pixel."""
    return 0.1 + 0.9 * torch.rand(*shape, generator=seeded(7))


@pytest.mark.parametrize("transform", STRONG, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_dtype_and_range_are_kept(transform: Transform, dtype: torch.dtype) -> None:
    image = draw_image(16, 3, 10, 6).to(dtype)
    before = image.clone()
    result = transform(image, seeded())
    assert result.shape == image.shape
    assert result.dtype == dtype
    assert result.min() >= 0.0
    assert result.max() <= 1.0 + 1e-6
    assert torch.equal(image, before), "the input was changed in place"
    assert not torch.equal(result, image)


@pytest.mark.parametrize("transform", NEUTRAL, ids=name_of)
def test_strength_zero_is_the_identity(transform: Transform) -> None:
    image = draw_image(4, 3, 10, 6)
    assert torch.equal(transform(image, seeded()), image)


@pytest.mark.parametrize("transform", STRONG, ids=name_of)
def test_result_depends_on_the_generator_alone(transform: Transform) -> None:
    image = draw_image(16, 1, 9, 9)
    torch.manual_seed(1)
    first = transform(image, seeded(3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(transform(image, seeded(3)), first)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert not torch.equal(transform(image, seeded(4)), first)


@pytest.mark.parametrize("transform", STRONG, ids=name_of)
def test_each_image_gets_its_own_draw(transform: Transform) -> None:
    image = draw_image(1, 1, 9, 9).expand(32, 1, 9, 9)
    distinct = transform(image, seeded()).flatten(1).unique(dim=0)
    assert len(distinct) >= 2


@pytest.mark.parametrize("transform", [*STRONG[:3], STRONG[4]], ids=name_of)
def test_channels_of_an_image_move_together(transform: Transform) -> None:
    image = draw_image(8, 1, 9, 9).expand(8, 3, 9, 9)
    result = transform(image, seeded())
    assert torch.equal(result[:, 0], result[:, 1])
    assert torch.equal(result[:, 0], result[:, 2])


@pytest.mark.parametrize("transform", STRONG, ids=name_of)
def test_pickle_keeps_the_transform(transform: Transform) -> None:
    image = draw_image(4, 1, 9, 9)
    assert torch.equal(pickle.loads(pickle.dumps(transform))(image, seeded()), transform(image, seeded()))


def warp(
    image: Tensor,
    angle: float = 0.0,
    shift: tuple[float, float] = (0.0, 0.0),
    scale: float = 1.0,
    shear: float = 0.0,
) -> Tensor:
    theta = compute_affine_theta(
        angle=torch.tensor([angle]),
        shift=torch.tensor([shift]),
        scale=torch.tensor([scale]),
        shear=torch.tensor([shear]),
        height=image.shape[-2],
        width=image.shape[-1],
    )
    grid = torch.nn.functional.affine_grid(theta, list(image.shape), align_corners=False)
    return torch.nn.functional.grid_sample(image, grid, align_corners=False)


@pytest.mark.parametrize("quarter_turns", [1, 2, 3])
def test_affine_by_quarter_turns_is_rot90(quarter_turns: int) -> None:
    image = draw_image(1, 2, 7, 7)
    expected = torch.rot90(image, quarter_turns, dims=(-2, -1))
    torch.testing.assert_close(warp(image, angle=quarter_turns * math.pi / 2), expected, atol=1e-5, rtol=0.0)


def test_affine_quarter_turn_of_a_wide_image_keeps_its_angles() -> None:
    # A row of three pixels through the centre of a 5x9 image becomes a column, with the right end on top.
    image = torch.zeros(1, 1, 5, 9)
    image[0, 0, 2, 3:6] = torch.tensor([0.25, 0.5, 1.0])
    expected = torch.zeros(1, 1, 5, 9)
    expected[0, 0, 1:4, 4] = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(warp(image, angle=math.pi / 2), expected, atol=1e-5, rtol=0.0)


def test_affine_shift_moves_right_and_down() -> None:
    # 0.25 of 8 columns is 2 to the right, 0.25 of 4 rows is 1 down.
    image = draw_image(1, 1, 4, 8)
    expected = torch.zeros_like(image)
    expected[..., 1:, 2:] = image[..., :3, :6]
    torch.testing.assert_close(warp(image, shift=(0.25, 0.25)), expected, atol=1e-5, rtol=0.0)


def test_affine_shift_comes_after_the_rotation() -> None:
    image = draw_image(1, 1, 4, 4)
    expected = torch.zeros_like(image)
    expected[..., :, 1:] = torch.rot90(image, 1, dims=(-2, -1))[..., :, :3]
    torch.testing.assert_close(warp(image, angle=math.pi / 2, shift=(0.25, 0.0)), expected, atol=1e-5, rtol=0.0)


def test_affine_scale_enlarges() -> None:
    # A centred 2x2 square of ones has mass 4; bilinear enlargement by 2 multiplies the mass by 2 * 2.
    image = torch.zeros(1, 1, 8, 8)
    image[..., 3:5, 3:5] = 1.0
    assert warp(image, scale=2.0).sum().item() == pytest.approx(16.0, abs=1e-4)


def test_affine_shear_moves_upper_rows_rightwards() -> None:
    # tan = 1: a row lying d pixels above the centre moves d pixels to the right.
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, :, 2] = 1.0
    torch.testing.assert_close(warp(image, shear=math.pi / 4), torch.eye(5).flip(-1)[None, None], atol=1e-5, rtol=0.0)


def test_random_affine_stays_within_its_strengths() -> None:
    # The centre of mass of a point is the shift: at most 0.25 of 16 pixels, and nearly so in 512 draws.
    image = torch.zeros(512, 1, 16, 16)
    image[..., 7:9, 7:9] = 0.25
    result = RandomAffine(degrees=0.0, translate_frac=0.25, scale_frac=0.0, shear_degrees=0.0)(image, seeded())[:, 0]
    place = torch.arange(16.0) - 7.5
    for moved in [(result.sum(1) * place).sum(1), (result.sum(2) * place).sum(1)]:
        assert moved.abs().max() <= 4.0 + 1e-4
        assert moved.max() > 3.8
        assert moved.min() < -3.8


def test_random_affine_rotates_both_ways_up_to_degrees() -> None:
    # A point 6 pixels right of the centre; its angle is read from the centre of mass of the warped point.
    image = torch.zeros(512, 1, 17, 17)
    image[..., 8, 14] = 1.0
    result = RandomAffine(degrees=30.0, translate_frac=0.0, scale_frac=0.0, shear_degrees=0.0)(image, seeded())[:, 0]
    mass = result.sum((1, 2))
    place = torch.arange(17.0) - 8.0
    right, down = (result.sum(1) * place).sum(1) / mass, (result.sum(2) * place).sum(1) / mass
    degrees = torch.rad2deg(torch.atan2(-down, right))
    # The bilinear centre of mass is off by up to about half a pixel: asin(0.5 / 6) = 5 degrees.
    assert 26.0 < degrees.max() < 35.0
    assert -35.0 < degrees.min() < -26.0


def test_random_affine_scales_both_ways_up_to_scale_frac() -> None:
    # Enlarging by s multiplies the mass of a smooth blob inside the image by s * s.
    place = torch.arange(32.0) - 15.5
    line = torch.exp(-0.5 * (place / 3.0).square())
    image = (line[:, None] * line).expand(512, 1, 32, 32)
    result = RandomAffine(degrees=0.0, translate_frac=0.0, scale_frac=0.3, shear_degrees=0.0)(image, seeded())
    scale = (result.sum((1, 2, 3)) / image.sum((1, 2, 3))).sqrt()
    assert scale.max().item() == pytest.approx(1.3, abs=0.01)
    assert scale.min().item() == pytest.approx(0.7, abs=0.01)


def test_random_affine_shears_both_ways_up_to_shear_degrees() -> None:
    # The first row of a vertical line lies 8 pixels above the centre, so it moves by 8 * tan(shear).
    image = torch.zeros(512, 1, 17, 17)
    image[..., 8] = 1.0
    result = RandomAffine(degrees=0.0, translate_frac=0.0, scale_frac=0.0, shear_degrees=20.0)(image, seeded())
    moved = (result[:, 0, 0] * (torch.arange(17.0) - 8.0)).sum(1)
    assert moved.max().item() == pytest.approx(8.0 * math.tan(math.radians(20.0)), abs=0.1)
    assert moved.min().item() == pytest.approx(-8.0 * math.tan(math.radians(20.0)), abs=0.1)


def test_random_crop_is_a_window_of_the_padded_image() -> None:
    image = draw_image(64, 2, 5, 4)
    padded = torch.nn.functional.pad(image, [2, 2, 2, 2])
    result = RandomCrop(padding=2)(image, seeded())
    seen = set()
    for row in range(64):
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(result[row], padded[row, :, top : top + 5, left : left + 4])
        ]
        assert len(places) == 1
        seen.add(places[0])
    # 64 draws of 25 places: both ends of both axes turn up.
    assert {top for top, _ in seen} == set(range(5))
    assert {left for _, left in seen} == set(range(5))


def test_random_flip_with_probability_one_is_flip() -> None:
    image = draw_image(8, 3, 5, 4)
    assert torch.equal(RandomFlip(probability=1.0)(image, seeded()), torch.flip(image, dims=[-1]))


def test_random_flip_mirrors_the_given_share() -> None:
    image = draw_image(1, 1, 1, 4).expand(2000, 1, 1, 4)
    flipped = (RandomFlip(probability=0.25)(image, seeded()) != image).any(dim=-1).float().mean().item()
    # Standard error sqrt(0.25 * 0.75 / 2000) = 0.0097; 4 of them.
    assert flipped == pytest.approx(0.25, abs=0.039)


def test_cutout_blanks_one_square() -> None:
    image = draw_image(256, 2, 9, 7)
    result = Cutout(size=3)(image, seeded())
    blank = result == 0.0
    assert torch.equal(result[~blank], image[~blank])
    rows, columns = blank[:, 0].any(dim=2).sum(1), blank[:, 0].any(dim=1).sum(1)
    assert torch.equal(blank[:, 0].sum((1, 2)), rows * columns)
    # 3 inside, 2 where the centre is the first or the last pixel of an axis.
    assert set(rows.tolist()) == {2, 3}
    assert set(columns.tolist()) == {2, 3}


def test_gaussian_noise_has_the_given_standard_deviation() -> None:
    image = torch.full((4, 1, 50, 50), 0.5)
    noise = GaussianNoise(std=0.05)(image, seeded()) - image
    # 10,000 values, none clamped (10 standard deviations away); standard error 0.05 / sqrt(20000) = 0.00035.
    assert noise.std().item() == pytest.approx(0.05, abs=0.0015)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.002)
