"""Networks that map an image batch to class logits.

Belongs here: `nn.Module`s from `image (B, C, H, W) float` to `logits (B, num_classes)` whose arguments are config
keys, with an output layer `head`. Does not belong here: losses, metrics, augmentation, normalisation, trainers.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor, nn

from leyden.errors import ConfigError
from leyden.nets.plan import Plan, plan_layers
from leyden.nets.transformer import TransformerBlock, plan_blocks

Count = Annotated[int, Ge(1)]
DropoutFrac = Annotated[float, Ge(0.0), Lt(1.0)]


class MLP(nn.Module):
    """Fully connected network over the flattened pixels, with ReLU.

    Shape:
        image (B, in_channels, image_size, image_size) float -> logits (B, num_classes), same dtype.

    Args:
        num_classes, in_channels: Number of logits, and channels of the image.
        image_size: Side of the image, in pixels.
        hidden_dims: Width of each hidden layer; an empty list gives logistic regression.
        dropout: Share of each hidden layer that is zeroed in training, 0..1.
    """

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count,
        image_size: Count,
        hidden_dims: Sequence[Count] = (128,),
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = in_channels * image_size * image_size
        for hidden_dim in hidden_dims:
            layers += [nn.Linear(width, hidden_dim), nn.ReLU(), nn.Dropout(dropout)]
            width = hidden_dim
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from image (B, C, H, W)."""
        logits: Tensor = self.head(self.hidden(image))
        return logits

    def parallel_plan(self) -> Plan:
        """How tensor parallel training cuts it: each second layer takes up what the one before shares out."""
        hidden = range(1, len(self.hidden), 3)  # Linear, ReLU, Dropout
        return plan_layers([*((f"hidden.{i}", f"hidden.{i + 2}") for i in hidden), ("head", None)])


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection.

    Shape:
        features (B, in_channels, H, W) -> (B, out_channels, ceil(H / stride), ceil(W / stride)), same dtype.

    Source: He et al. 2015, https://arxiv.org/abs/1512.03385, with GroupNorm, so that rows stay independent.
    """

    def __init__(self, in_channels: Count, out_channels: Count, stride: Count, num_groups: Count) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.skip = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Adds the branch to the features; the shapes are those of the class."""
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        return F.relu(residual + self.skip(features))


class ResNet(nn.Module):
    """Residual CNN with GroupNorm: stem, one stage a width, mean over positions, linear head.

    Every stage after the first halves the resolution. Works for any image size; only the cost depends on it.

    Shape:
        image (B, in_channels, H, W) float -> logits (B, num_classes), same dtype.

    Args:
        num_classes, in_channels: Number of logits, and channels of the image.
        widths: Channels of each stage; each must be a multiple of `num_groups`.
        blocks_per_stage: Residual blocks in each stage.
        num_groups: Groups of every GroupNorm.
        stem_stride: Stride of the first convolution; 2 makes the network about four times cheaper.
        upsample: Factor by which the image is enlarged (bilinear) first; for images as small as 8x8.
        dropout: Share of the pooled features that is zeroed in training, 0..1.

    Raises:
        ConfigError: `num_groups` does not divide a width.

    Source: He et al. 2015, https://arxiv.org/abs/1512.03385; GroupNorm: https://arxiv.org/abs/1803.08494.
    """

    repeated_blocks: ClassVar[str] = "blocks"

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count,
        widths: Annotated[Sequence[Count], MinLen(1)] = (32, 64),
        blocks_per_stage: Count = 1,
        num_groups: Count = 8,
        stem_stride: Count = 1,
        upsample: Count = 1,
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        if not widths or any(width % num_groups != 0 for width in widths):
            raise ConfigError(
                f"ResNet: every width must be a multiple of `num_groups`, got widths={list(widths)} with "
                f"num_groups={num_groups}. Allowed: a list of one or more of {num_groups}, {2 * num_groups}, "
                f"{3 * num_groups}, ... Change `widths`, or set `num_groups` to a common divisor of them."
            )
        self.upsample = upsample
        self.stem = nn.Conv2d(in_channels, widths[0], 3, stride=stem_stride, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(num_groups, widths[0])
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(channels, width, stride, num_groups))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from image (B, C, H, W)."""
        if self.upsample > 1:
            image = F.interpolate(image, scale_factor=self.upsample, mode="bilinear", align_corners=False)
        features = self.blocks(F.relu(self.stem_norm(self.stem(image))))
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))
        return logits


class ViT(nn.Module):
    """Small pre-norm vision transformer: patches, learned positions, mean over tokens, linear head.

    Shape:
        image (B, in_channels, image_size, image_size) float -> logits (B, num_classes), same dtype.
        Inside: tokens (B, (image_size / patch_size) ** 2, embed_dim).

    Args:
        num_classes, in_channels: Number of logits, and channels of the image.
        image_size, patch_size: Side of the image and of a patch, in pixels; the second divides the first.
        embed_dim: Width of a token; must be a multiple of `num_heads`.
        depth: Number of transformer blocks.
        num_heads: Attention heads of a block.
        mlp_ratio: Width of a block's MLP as a multiple of `embed_dim`.
        dropout: Share zeroed in training on embeddings, on residual branches and inside the MLPs, 0..1.

    Raises:
        ConfigError: `patch_size` does not divide `image_size`, or `num_heads` does not divide `embed_dim`.

    Source: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, with the mean over tokens as output.
    """

    repeated_blocks: ClassVar[str] = "blocks"

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count,
        image_size: Count,
        patch_size: Count,
        embed_dim: Count,
        depth: Count,
        num_heads: Count,
        mlp_ratio: Annotated[float, Gt(0.0)] = 2.0,
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        problems = []
        if image_size % patch_size != 0:
            problems.append(
                f"ViT: `patch_size` must divide the image size {image_size}, got {patch_size}. "
                f"Allowed: {_compute_divisors(image_size)}. Set `patch_size` to one of these."
            )
        if embed_dim % num_heads != 0:
            problems.append(
                f"ViT: `embed_dim` must be a multiple of `num_heads`, got embed_dim={embed_dim} with "
                f"num_heads={num_heads}. Allowed num_heads for {embed_dim}: {_compute_divisors(embed_dim)}. "
                f"Set `num_heads` to one of these or `embed_dim` to {num_heads * -(-embed_dim // num_heads)}."
            )
        if problems:
            raise ConfigError("\n".join(problems))
        self.patch_embed = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size)
        # As large as an embedded patch of normalised pixels: small data sets never learn the places from 0.02.
        self.position_embed = nn.Parameter(0.5 * torch.randn(1, (image_size // patch_size) ** 2, embed_dim))
        self.dropout = nn.Dropout(dropout)
        mlp_dim = max(1, round(embed_dim * mlp_ratio))
        self.blocks = nn.Sequential(*(TransformerBlock(embed_dim, num_heads, mlp_dim, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from image (B, C, H, W)."""
        tokens = self.patch_embed(image).flatten(2).transpose(1, 2) + self.position_embed
        tokens = self.blocks(self.dropout(tokens))
        logits: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return logits

    def parallel_plan(self) -> Plan:
        """How tensor parallel training cuts it: attention by heads, MLPs by their width."""
        return plan_blocks("blocks", self.blocks)


def _compute_divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
