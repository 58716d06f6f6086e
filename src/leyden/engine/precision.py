"""Number formats of a step. Lightning does the mixed ones; here is what it leaves open.

A network wholly in bfloat16 keeps its task in float32: inputs are converted on the way in and outputs on the way out,
so that normalisation of targets, losses and metrics lose nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from leyden.engine.settings import PRECISION_ALIASES
from leyden.errors import ConfigError

TRUE_FORMATS = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
MIXED_FORMATS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
REFUSED = {
    "cpu": {"16-mixed": "float16 with a loss scale needs a GPU"},
    "mps": {"64-true": "Apple's GPU has no float64"},
}


def check_precision(precision: str, accelerator: str) -> None:
    """Refuses a number format that the device cannot train with.

    Raises:
        ConfigError: naming the formats that it can.
    """
    refused = REFUSED.get(accelerator, {})
    if precision in refused:
        allowed = [p for p in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true") if p not in refused]
        instead = "bf16-mixed" if accelerator == "cpu" else "32"
        raise ConfigError(
            f"`engine.precision` {precision} does not work on {accelerator}: {refused[precision]}. "
            f"Allowed here: {', '.join(allowed)}. Use engine.precision={instead}."
        )


def trainer_precision(precision: str, owns_step: bool) -> str:
    """What Lightning's Trainer is told: a task of Leyden converts its own network to bfloat16."""
    return "32-true" if precision == "bf16-true" and owns_step else precision


def convert_net(net: nn.Module, precision: str) -> None:
    """Converts a network whose whole arithmetic is in another format than float32, and what goes in and out."""
    dtype = TRUE_FORMATS.get(precision)
    if dtype is None:
        return
    net.to(dtype)
    net.register_forward_pre_hook(partial(_convert_inputs, dtype))
    if dtype is torch.bfloat16:
        net.register_forward_hook(_widen_output)


def run_in_precision(net: nn.Module, precision: str) -> None:
    """Lets a restored network compute in the format it was trained in, without Lightning's Trainer."""
    precision = PRECISION_ALIASES.get(precision, precision)
    convert_net(net, precision)
    if precision in MIXED_FORMATS:
        device = next((p.device.type for p in net.parameters()), "cpu")
        autocast = torch.autocast(device, MIXED_FORMATS[precision], cache_enabled=False)
        net.forward = autocast(net.forward)
        net.register_forward_hook(_widen_output)  # Lightning's context covers the loss too, which is then in float32


def unscale_gradient(plugin: Precision, optimizer: torch.optim.Optimizer) -> None:
    """Divides a float16 gradient by its loss scale where Lightning leaves that to a fused optimiser.

    Clipping must see the gradient itself. Where an element overflowed, the optimiser skips this step and the scale
    shrinks: that is how the scale is found and says nothing about the loss, so it is no reason to stop.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)


def _convert_inputs(dtype: torch.dtype, net: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _widen_output(net: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output
