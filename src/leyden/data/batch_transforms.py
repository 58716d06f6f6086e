"""Random augmentations of whole image batches, on the device where the batch lies.

Belongs here: callables `(image (B, C, H, W) float in [0, 1], generator) -> image` of the same shape, dtype
and device, vectorised over the batch, whose only source of randomness is `generator` (which lives on the
image's device). They run before normalisation, so a pixel outside the picture is 0. Does not belong here:
transforms of single samples, labels or files, and normalisation.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Lt
from torch import Tensor


class RandomAffine:
    """Rotates, moves, scales and shears each image about its centre, with one random transform an image.

    Bilinear interpolation; pixels from outside the image are 0. With all strengths 0 nothing is changed.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype.

    Args:
        degrees: Rotation is uniform in [-degrees, degrees].
        translate_frac: Shift of each axis is uniform in [-translate_frac, translate_frac] of its size.
        scale_frac: Scale is uniform in [1 - scale_frac, 1 + scale_frac].
        shear_degrees: Horizontal shear is uniform in [-shear_degrees, shear_degrees].
    """

    def __init__(
        self,
        degrees: Annotated[float, Ge(0.0), Le(180.0)],
        translate_frac: Annotated[float, Ge(0.0), Le(1.0)],
        scale_frac: Annotated[float, Ge(0.0), Lt(1.0)],
        shear_degrees: Annotated[float, Ge(0.0), Lt(90.0)],
    ) -> None:
        self.degrees = degrees
        self.translate_frac = translate_frac
        self.scale_frac = scale_frac
        self.shear_degrees = shear_degrees

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Warps image (B, C, H, W)."""
        if self.degrees == self.translate_frac == self.scale_frac == self.shear_degrees == 0:
            return image
        batch_size, _, height, width = image.shape
        # One row a quantity, uniform in [-1, 1): angle, shift in x, shift in y, scale, shear.
        draw = 2.0 * torch.rand(5, batch_size, generator=generator, device=image.device) - 1.0
        theta = compute_affine_theta(
            angle=draw[0] * math.radians(self.degrees),
            shift=draw[1:3].T * self.translate_frac,
            scale=1.0 + draw[3] * self.scale_frac,
            shear=draw[4] * math.radians(self.shear_degrees),
            height=height,
            width=width,
        )
        grid = F.affine_grid(theta.to(image.dtype), list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def compute_affine_theta(angle: Tensor, shift: Tensor, scale: Tensor, shear: Tensor, height: int, width: int) -> Tensor:
    """Computes the matrices that `F.affine_grid` takes, which map output to input positions.

    The picture itself is sheared, then scaled, then rotated counterclockwise as seen (as `torch.rot90` does),
    then moved; the matrix is the inverse of that. Angles stay angles for images that are not square.

    Shape:
        angle, scale, shear (B,) and shift (B, 2) -> theta (B, 2, 3).

    Args:
        angle: Rotation in radians.
        shift: Shift in x (rightwards) and y (downwards), as a share of width and height.
        scale: Factor of enlargement.
        shear: Angle in radians by which the upper half leans rightwards.
        height: Image height in pixels.
        width: Image width in pixels.
    """
    cos, sin, tan = torch.cos(angle), torch.sin(angle), torch.tan(shear)
    # Inverse of rotation @ scale @ shear in pixels, with x rightwards and y downwards:
    # shear^-1 = [[1, tan], [0, 1]], rotation^-1 = [[cos, -sin], [sin, cos]].
    xx, xy = (cos + tan * sin) / scale, (tan * cos - sin) / scale
    yx, yy = sin / scale, cos / scale
    # affine_grid measures each axis in half sizes of the image, so the mixed terms carry the aspect ratio.
    aspect = height / width
    xy, yx = xy * aspect, yx / aspect
    shift_x, shift_y = 2.0 * shift[:, 0], 2.0 * shift[:, 1]
    row_x = torch.stack([xx, xy, -(xx * shift_x + xy * shift_y)], dim=1)
    row_y = torch.stack([yx, yy, -(yx * shift_x + yy * shift_y)], dim=1)
    return torch.stack([row_x, row_y], dim=1)


class RandomCrop:
    """Pads each image with zeros and cuts a window of the original size at a random place, one an image.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype.

    Args:
        padding: Zeros added on every side, in pixels; the picture moves by -padding..padding on each axis.
    """

    def __init__(self, padding: Annotated[int, Ge(0)]) -> None:
        self.padding = padding

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Crops image (B, C, H, W)."""
        if self.padding == 0:
            return image
        batch_size, num_channels, height, width = image.shape
        device = image.device
        offset = torch.randint(2 * self.padding + 1, (2, batch_size, 1), generator=generator, device=device)
        rows = offset[0] + torch.arange(height, device=device)
        columns = offset[1] + torch.arange(width, device=device)
        padded = F.pad(image, [self.padding] * 4)
        return padded[
            torch.arange(batch_size, device=device)[:, None, None, None],
            torch.arange(num_channels, device=device)[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]


class RandomFlip:
    """Mirrors each image left to right with the given probability.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype.

    Args:
        probability: Probability that an image is mirrored, 0..1.
    """

    def __init__(self, probability: Annotated[float, Ge(0.0), Le(1.0)] = 0.5) -> None:
        self.probability = probability

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Flips image (B, C, H, W)."""
        draw = torch.rand(image.shape[0], 1, 1, 1, generator=generator, device=image.device)
        return torch.where(draw < self.probability, image.flip(-1), image)


class Cutout:
    """Blanks one square an image, centred on a random pixel; the part beyond the border is lost.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype.

    Args:
        size: Side of the square, in pixels.

    Source: DeVries & Taylor 2017, https://arxiv.org/abs/1708.04552.
    """

    def __init__(self, size: Annotated[int, Ge(0)]) -> None:
        self.size = size

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Blanks a square in image (B, C, H, W)."""
        if self.size == 0:
            return image
        batch_size, _, height, width = image.shape
        inside_rows = self._draw_span(height, batch_size, generator, image.device)
        inside_columns = self._draw_span(width, batch_size, generator, image.device)
        square = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
        return image.masked_fill(square, 0.0)

    def _draw_span(self, length: int, batch_size: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Draws which positions of an axis lie in the square: (batch_size, length) bool."""
        centre = torch.randint(length, (batch_size, 1), generator=generator, device=device)
        distance = torch.arange(length, device=device) - (centre - self.size // 2)
        return (distance >= 0) & (distance < self.size)


class GaussianNoise:
    """Adds independent normal noise to each value and clamps the result to [0, 1].

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype.

    Args:
        std: Standard deviation, in units of the full range 0..1.
    """

    def __init__(self, std: Annotated[float, Ge(0.0)]) -> None:
        self.std = std

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Adds noise to image (B, C, H, W)."""
        if self.std == 0:
            return image
        noise = torch.randn(image.shape, generator=generator, device=image.device, dtype=image.dtype)
        return (image + self.std * noise).clamp(0.0, 1.0)
