"""The memory layout of images and of what convolutions work on."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import nn

from leyden.errors import ConfigError

log = logging.getLogger(__name__)


def lay_out(net: nn.Module, channels_last: bool | Literal["auto"], accelerator: str) -> None:
    """Lays out a network's convolutions channels last (N, H, W, C in memory), if wanted.

    The weights decide: a convolution gives its output in the layout of its weights, and the operators after it keep
    that. Shapes stay as they are, results differ in their last bits.

    Args:
        net: the network, changed in place.
        channels_last: whether to do it; "auto" does it for networks with 2-D convolutions, except on Apple's GPU.
        accelerator: kind of device that the network will be on.

    Raises:
        ConfigError: where there is nothing to lay out.
    """
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in net.modules())
    if channels_last == "auto":
        channels_last = has_convolutions and accelerator != "mps"
    if not channels_last:
        return
    if not has_convolutions:
        raise ConfigError(
            f"`hardware.channels_last` is true, but `model.net` ({type(net).__name__}) has no 2-D convolution, for "
            "which alone it is meant. Use hardware.channels_last=auto."
        )
    net.to(memory_format=torch.channels_last)
    log.info("Memory layout of the convolutions: channels last.")
