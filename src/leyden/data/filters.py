"""Image filters, vectorised over a batch on its device: blur, edges, sharpening.

Belongs here: callables `image (B, C, H, W) float in [0, 1] -> image` of the same shape, dtype and device, that treat
each channel of each image by itself. As `data.filters` they apply to every image that a network sees. The result of
an image has the same bits whatever batch it is in: sums run over the taps of a kernel in a fixed order, with products
and sums rounded separately (a library's convolution may choose another algorithm for another batch size). Beyond the
border an image goes on as its mirror image about the outermost pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

Sigma = Annotated[float, Gt(0.0), Le(50.0)]


class GaussianBlur:
    """Blurs each image with a normal kernel.

    With one `sigma` and probability 1 it is a filter, the same for all images. With a range, or a probability below 1,
    it is an augmentation, with one draw an image.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype, clamped to [0, 1].

    Args:
        sigma: Standard deviation of the kernel in pixels, or the two ends of a range it is uniform in. The kernel ends
            at 4 of the (largest) standard deviations.
        probability: Probability that an image is blurred, 0..1.
    """

    def __init__(
        self, sigma: Sigma | tuple[Sigma, Sigma], probability: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    ) -> None:
        self.low, self.high = sigma if isinstance(sigma, Sequence) else (sigma, sigma)
        self.probability = probability

    @classmethod
    def config_problems(cls, values: Mapping[str, Any]) -> list[str]:
        """Rules between values that their types cannot say; `{key}` stands for the block."""
        match values.get("sigma"):
            case [int() | float() as low, int() | float() as high] if low > high:
                return [f"`{{key}}.sigma` is [{low}, {high}], but a range goes from the smaller to the larger value."]
        return []

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, so that it can only be an augmentation."""
        return self.low != self.high or self.probability < 1

    def __call__(self, image: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Blurs image (B, C, H, W); `generator` lies on its device and is needed where `is_random`."""
        radius = int(4 * self.high + 0.5)
        if not self.is_random:
            weights = [math.exp(-0.5 * (offset / self.low) ** 2) for offset in range(-radius, radius + 1)]
            taps = [weight / math.fsum(weights) for weight in weights]
            return convolve(convolve(image, taps, dim=-1), taps, dim=-2).clamp(0.0, 1.0)
        assert generator is not None, "a random blur without a generator"
        draw = torch.rand(2, len(image), 1, generator=generator, device=image.device)
        sigma = self.low + (self.high - self.low) * draw[0]
        offset = torch.arange(-radius, radius + 1, device=image.device)
        kernel = torch.exp(-0.5 * (offset / sigma).square())
        columns = (kernel / kernel.sum(dim=1, keepdim=True)).to(image.dtype).T.reshape(-1, len(image), 1, 1, 1)
        blurred = convolve(convolve(image, list(columns), dim=-1), list(columns), dim=-2).clamp(0.0, 1.0)
        return torch.where(draw[1].view(-1, 1, 1, 1) < self.probability, blurred, image)


class SobelEdges:
    """The strength of edges: the length of the gradient by Sobel's operators, for each channel.

    A straight edge from 0 to 1 along rows or columns gives 1; what is more (at corners) is clamped.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype, in [0, 1].

    Source: Sobel & Feldman 1968, "A 3x3 isotropic gradient operator for image processing".
    """

    def __call__(self, image: Tensor) -> Tensor:
        """Edges of image (B, C, H, W)."""
        smooth, slope = (0.25, 0.5, 0.25), (-1.0, 0.0, 1.0)
        in_x = convolve(convolve(image, slope, dim=-1), smooth, dim=-2)
        in_y = convolve(convolve(image, slope, dim=-2), smooth, dim=-1)
        return (in_x.square() + in_y.square()).sqrt().clamp(0.0, 1.0)


class Sharpen:
    """Adds `amount` times the difference between each image and its smoothed copy (weights 1 around 5, of 13).

    Inside the border it is Pillow's and torchvision's sharpness with factor 1 + amount; they leave the outermost
    pixels as they are, here these are sharpened too.

    Shape:
        image (B, C, H, W) float -> (B, C, H, W), same dtype, clamped to [0, 1].

    Args:
        amount: Strength; 0 changes nothing.
    """

    def __init__(self, amount: Annotated[float, Ge(0.0), Le(100.0)]) -> None:
        self.amount = amount

    def __call__(self, image: Tensor) -> Tensor:
        """Sharpens image (B, C, H, W)."""
        if self.amount == 0:
            return image
        # The kernel [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13 is nine ones and four more in the centre.
        nine = convolve(convolve(image, (1.0, 1.0, 1.0), dim=-1), (1.0, 1.0, 1.0), dim=-2)
        smooth = (nine + 4.0 * image) / 13.0
        return (image + self.amount * (image - smooth)).clamp(0.0, 1.0)


def convolve(image: Tensor, taps: Sequence[float | Tensor], dim: int) -> Tensor:
    """Slides a kernel along one axis (a correlation: the first tap is for the position before).

    Shape:
        image (B, C, H, W) -> (B, C, H, W), same dtype.

    Args:
        image: what is convolved.
        taps: an odd number of weights, each a number or a tensor that goes with image, e.g. (B, 1, 1, 1).
        dim: the axis.
    """
    length = image.shape[dim]
    padded = image.index_select(dim, mirror_index(length, len(taps) // 2, image.device))
    result = torch.zeros_like(image)
    for place, tap in enumerate(taps):
        # Not `add_(..., alpha=tap)`: whether that rounds once or twice depends on where in memory a value lies.
        result += padded.narrow(dim, place, length) * tap
    return result


def mirror_index(length: int, radius: int, device: torch.device) -> Tensor:
    """Positions of an axis with `radius` more at both ends, which mirror it, several times where need be."""
    position = torch.arange(-radius, length + radius, device=device)
    if length == 1:
        return torch.zeros_like(position)
    period = 2 * (length - 1)
    position = position.remainder(period)
    return torch.where(position < length, position, period - position)
