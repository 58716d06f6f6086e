"""Which networks keep their channels innermost in memory, and that this changes no more than last bits."""

import pytest
import torch
from torch import nn

from leyden.errors import ConfigError
from leyden.hardware.layout import lay_out
from leyden.vision.nets import MLP, ResNet


def build() -> ResNet:
    torch.manual_seed(0)
    return ResNet(num_classes=10, in_channels=3, widths=[8, 16], num_groups=4)


def is_channels_last(net: nn.Module) -> bool:
    return all(
        weight.is_contiguous(memory_format=torch.channels_last) for weight in net.parameters() if weight.dim() == 4
    )


@pytest.mark.parametrize(
    ("wanted", "accelerator", "expected"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda", True),
        ("auto", "mps", False),
        (True, "mps", True),
        (True, "cpu", True),
        (False, "cuda", False),
    ],
)
def test_layout_of_a_convolutional_network(wanted: bool | str, accelerator: str, expected: bool) -> None:
    net = build()
    lay_out(net, wanted, accelerator)  # type: ignore[arg-type]
    assert is_channels_last(net) == expected


def test_activations_keep_the_layout_and_results_their_values() -> None:
    net, plain = build(), build()
    lay_out(net, True, "cpu")
    layouts = []
    for module in net.blocks.children():
        module.register_forward_hook(
            lambda _, inputs, output: layouts.append(output.is_contiguous(memory_format=torch.channels_last))
        )
    image = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    logits, expected = net(image), plain(image)
    assert layouts == [True, True]
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_network_without_convolutions() -> None:
    net = MLP(num_classes=2, in_channels=1, image_size=4)
    lay_out(net, "auto", "cpu")
    with pytest.raises(ConfigError, match=r"hardware\.channels_last.*MLP.*no 2-D convolution.*channels_last=auto"):
        lay_out(net, True, "cpu")
