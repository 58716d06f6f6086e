"""Activation checkpointing: the blocks of a network keep their inputs only and compute the rest again for the gradient.

A network says in the class attribute `repeated_blocks` which of its modules holds the blocks.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from leyden.errors import ConfigError


def recompute_blocks(net: nn.Module) -> None:
    """Lets each repeated block of a network compute its activations again in the backward pass.

    The result is the same, dropout included (the generators are set back for the second time); names of weights stay.

    Raises:
        ConfigError: for a network that names no blocks, or whose blocks would count twice what they see.
    """
    kind = f"{type(net).__module__}.{type(net).__name__}"
    name = getattr(net, "repeated_blocks", None)
    if name is None:
        raise ConfigError(
            f"`engine.activation_checkpointing` is true, but `model.net` ({kind}) does not say which of its modules "
            'are repeated blocks. Give the class an attribute, e.g. repeated_blocks = "blocks" for its nn.Sequential '
            "or nn.ModuleList `blocks`, or use engine.activation_checkpointing=false."
        )
    blocks = getattr(net, name)
    bad = next((n for n, module in blocks.named_modules() if isinstance(module, _BatchNorm)), None)
    if bad is not None:
        raise ConfigError(
            f"`engine.activation_checkpointing` is true, but `{name}.{bad}` of `model.net` ({kind}) is a BatchNorm, "
            "whose running statistics would see each batch twice. Use a network with GroupNorm or LayerNorm, or "
            "engine.activation_checkpointing=false."
        )
    for block in blocks.children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
