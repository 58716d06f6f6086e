"""Activation checkpointing: the same bits with less memory, and only where it can be done."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leyden.engine.recompute import recompute_blocks
from leyden.errors import ConfigError
from leyden.nlp.nets import TransformerEncoder
from leyden.vision.nets import MLP, ResNet, ViT


def build(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(4, 1, 8, 8)
    if kind == "resnet":
        return ResNet(3, 1, widths=(8, 16), dropout=0.5), image
    if kind == "vit":
        return ViT(3, 1, 8, patch_size=4, embed_dim=8, depth=3, num_heads=2, dropout=0.5), image
    return TransformerEncoder(3, 9, embed_dim=8, num_heads=2, depth=3, dropout=0.5), torch.randint(0, 9, (4, 7))


def compute(net: nn.Module, batch: Tensor) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many numbers were kept between forward and backward."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = net(batch)
    output.square().sum().backward()
    return [output, *(p.grad for p in net.parameters() if p.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("kind", ["resnet", "vit", "transformer"])
def test_same_bits_with_dropout_and_fewer_tensors_kept(kind: str) -> None:
    net, batch = build(kind)
    names = list(net.state_dict())
    expected, kept_before = compute(net, batch)
    net.zero_grad()
    recompute_blocks(net)
    found, kept = compute(net, batch)
    assert len(found) == len(expected) > 5
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert kept < kept_before
    assert list(net.state_dict()) == names


def test_network_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        recompute_blocks(MLP(3, 1, 8))
    assert str(caught.value) == (
        "`engine.activation_checkpointing` is true, but `model.net` (leyden.vision.nets.MLP) does not say which of its "
        'modules are repeated blocks. Give the class an attribute, e.g. repeated_blocks = "blocks" for its '
        "nn.Sequential or nn.ModuleList `blocks`, or use engine.activation_checkpointing=false."
    )


def test_blocks_with_batch_norm_are_refused() -> None:
    class Net(nn.Module):
        repeated_blocks: ClassVar[str] = "layers"

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    with pytest.raises(ConfigError, match=r"`layers\.0\.1` of `model\.net` .*Net\) is a BatchNorm"):
        recompute_blocks(Net())
