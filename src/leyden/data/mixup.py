"""Changes of whole batches that mix images and their labels.

Belongs here: objects with `change_batch(batch, generator) -> batch`, where `batch` has `image` (B, C, H, W) float in
[0, 1], `label` (B,) and `label_probability` (B, num_classes). Changes of images alone are in `batch_transforms`.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from leyden.data.loaders import Batch

# Tries of the rejection method; each succeeds in 95 of 100 cases or more, so all fail once in 10**20.
NUM_TRIES = 16


class Mixup:
    """Mixes each image and its label with those of a random partner in the batch.

    The image's own share is drawn for each image from Beta(alpha, alpha). `label_probability` is mixed like the image;
    `label` becomes the class of the larger share. Partners are found within a process's part of the batch, before it
    is cut into micro-batches.

    Shape:
        image (B, C, H, W), label_probability (B, num_classes) float and label (B,) int64, all kept.

    Args:
        alpha: Small values leave most images nearly as they are, 1 makes all shares equally likely.

    Source: Zhang et al. 2018, https://arxiv.org/abs/1710.09412, with one share an image in place of one a batch.
    """

    def __init__(self, alpha: Annotated[float, Gt(0.0), Le(100.0)]) -> None:
        self.alpha = alpha

    def change_batch(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Mixes a batch; `generator` lies on its device."""
        image, probability = batch["image"], batch["label_probability"]
        share = draw_beta(self.alpha, len(image), generator)
        partner = torch.randperm(len(image), generator=generator, device=image.device)
        probability = probability.lerp(probability[partner], 1.0 - share[:, None])
        return {
            **batch,
            "image": image.lerp(image[partner], (1.0 - share).to(image.dtype)[:, None, None, None]),
            "label_probability": probability,
            "label": probability.argmax(dim=1),
        }


def draw_beta(alpha: float, num: int, generator: torch.Generator) -> Tensor:
    """Draws from Beta(alpha, alpha) on the generator's device, without waiting for the device.

    A Beta variable is G1 / (G1 + G2) of two Gamma variables. `torch.distributions` takes no generator, so they are
    drawn here from normal and uniform numbers. Logarithms keep a small alpha from giving 0 / 0.

    Returns:
        (num,) float32 in [0, 1].
    """
    log_gamma = draw_log_gamma(alpha, (2, num), generator)
    return torch.sigmoid(log_gamma[0] - log_gamma[1])


def draw_log_gamma(shape: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws logarithms of Gamma(shape, 1) variables, float32, on the generator's device.

    Source: Marsaglia & Tsang 2000, "A simple method for generating gamma variables",
    https://doi.org/10.1145/358407.358414, for shape + 1, times U^(1 / shape) as in its section 6.
    """
    device = generator.device
    d = shape + 1.0 - 1.0 / 3.0
    x = torch.randn(*size, NUM_TRIES, generator=generator, device=device)
    u = 1.0 - torch.rand(*size, NUM_TRIES, generator=generator, device=device)  # in (0, 1]
    v = (1.0 + x / math.sqrt(9.0 * d)) ** 3
    log_v = v.clamp(min=torch.finfo(v.dtype).tiny).log()
    accepted = (v > 0) & (u.log() < 0.5 * x.square() + d - d * v + d * log_v)
    first = accepted.int().argmax(dim=-1, keepdim=True)  # of the tries that are good
    power = 1.0 - torch.rand(*size, generator=generator, device=device)
    return math.log(d) + log_v.gather(-1, first).squeeze(-1) + power.log() / shape
