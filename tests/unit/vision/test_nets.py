"""Networks: shapes, sizes known by arithmetic, independence of the rows, gradients and error messages."""

import pytest
import torch
from torch import Tensor, nn

from leyden.errors import ConfigError
from leyden.vision.nets import MLP, ResidualBlock, ResNet, ViT


def build_nets(in_channels: int, image_size: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "mlp": MLP(num_classes=7, in_channels=in_channels, image_size=image_size, hidden_dims=(16, 12), dropout=0.1),
        "resnet": ResNet(num_classes=7, in_channels=in_channels, widths=(8, 16, 16), dropout=0.1),
        "resnet_upsample": ResNet(num_classes=7, in_channels=in_channels, widths=(8,), upsample=2, stem_stride=2),
        "vit": ViT(
            num_classes=7,
            in_channels=in_channels,
            image_size=image_size,
            patch_size=4,
            embed_dim=16,
            depth=2,
            num_heads=2,
            dropout=0.1,
        ),
    }


NAMES = sorted(build_nets(in_channels=1, image_size=8))


def draw_image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(("in_channels", "image_size"), [(1, 8), (1, 28), (3, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_have_one_row_an_image_and_one_column_a_class(name: str, in_channels: int, image_size: int) -> None:
    net = build_nets(in_channels, image_size)[name]
    logits = net(draw_image(2, in_channels, image_size, image_size))
    assert logits.shape == (2, 7)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_row_alone_equals_row_in_batch(name: str) -> None:
    net = build_nets(in_channels=3, image_size=8)[name].eval()
    image = draw_image(5, 3, 8, 8)
    with torch.no_grad():
        together = net(image)
        alone = torch.cat([net(image[row : row + 1]) for row in range(5)])
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_all_parameters(name: str) -> None:
    net = build_nets(in_channels=3, image_size=8)[name]
    target = torch.tensor([0, 1, 2, 3, 4])
    nn.functional.cross_entropy(net(draw_image(5, 3, 8, 8)), target).backward()
    without = [key for key, value in net.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.parametrize("name", NAMES)
def test_output_layer_is_called_head(name: str) -> None:
    head = build_nets(in_channels=1, image_size=8)[name].head
    assert isinstance(head, nn.Linear)
    assert head.out_features == 7


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_gives_the_same_logits(name: str) -> None:
    net = build_nets(in_channels=3, image_size=8)[name].eval()
    image = draw_image(2, 3, 8, 8)
    with torch.no_grad():
        expected = net(image)
        logits = net.to(memory_format=torch.channels_last)(image.to(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_mlp_784_128_10_has_101770_parameters() -> None:
    # 784 * 128 + 128 = 100,480 and 128 * 10 + 10 = 1,290.
    assert count_parameters(MLP(num_classes=10, in_channels=1, image_size=28)) == 100_480 + 1_290


def test_mlp_equals_relu_between_two_matrix_products() -> None:
    net = MLP(num_classes=3, in_channels=2, image_size=4, hidden_dims=(5,)).eval()
    image = draw_image(6, 2, 4, 4)
    first = net.hidden[1]
    assert isinstance(first, nn.Linear)
    hidden = (image.reshape(6, 32) @ first.weight.T + first.bias).clamp(min=0.0)
    torch.testing.assert_close(net(image), hidden @ net.head.weight.T + net.head.bias)


def test_mlp_without_hidden_layers_is_logistic_regression() -> None:
    # 64 * 10 + 10.
    assert count_parameters(MLP(num_classes=10, in_channels=1, image_size=8, hidden_dims=())) == 650


def test_resnet_parameters_by_arithmetic() -> None:
    # stem 3*8*9 + norm 2*8 = 232; block of 8: 2*8*8*9 + 2*2*8 = 1,184;
    # block 8 -> 16: 8*16*9 + 16*16*9 + 2*2*16 + skip 8*16 = 3,648; head 16*10 + 10 = 170.
    net = ResNet(num_classes=10, in_channels=3, widths=(8, 16))
    assert count_parameters(net) == 232 + 1_184 + 3_648 + 170


def test_vit_parameters_by_arithmetic() -> None:
    # patch 1*2*2*8 + 8 = 40; positions 16*8 = 128; block: norms 4*8, qkv 8*24 + 24, out 8*8 + 8,
    # mlp 8*16 + 16 and 16*8 + 8, together 600; last norm 16; head 8*10 + 10 = 90.
    net = ViT(
        num_classes=10,
        in_channels=1,
        image_size=8,
        patch_size=2,
        embed_dim=8,
        depth=3,
        num_heads=2,
        mlp_ratio=2.0,
    )
    assert count_parameters(net) == 40 + 128 + 3 * 600 + 16 + 90


@pytest.mark.parametrize(("stride", "expected"), [(1, (2, 16, 7, 7)), (2, (2, 16, 4, 4))])
def test_residual_block_shape(stride: int, expected: tuple[int, ...]) -> None:
    block = ResidualBlock(in_channels=8, out_channels=16, stride=stride, num_groups=8)
    assert block(draw_image(2, 8, 7, 7)).shape == expected


def test_residual_block_with_silent_branch_is_relu_of_its_input() -> None:
    block = ResidualBlock(in_channels=8, out_channels=8, stride=1, num_groups=8)
    nn.init.zeros_(block.norm2.weight)
    features = draw_image(2, 8, 5, 5)
    assert torch.equal(block(features), features.clamp(min=0.0))


def test_stem_stride_and_upsample_change_the_resolution_of_the_first_block() -> None:
    sizes: list[torch.Size] = []
    for stem_stride, upsample in [(1, 1), (2, 1), (1, 2)]:
        net = ResNet(num_classes=2, in_channels=1, widths=(8,), stem_stride=stem_stride, upsample=upsample)
        net.blocks.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape))
        net(draw_image(1, 1, 8, 8))
    assert sizes == [(1, 8, 8, 8), (1, 8, 4, 4), (1, 8, 16, 16)]


def test_vit_knows_the_place_of_a_patch() -> None:
    net = build_nets(in_channels=1, image_size=8)["vit"].eval()
    image = draw_image(1, 1, 8, 8)
    # Rolling by one patch gives the same patches in another order: only the positions can tell them apart.
    rolled = image.roll(4, dims=-1)
    assert not torch.allclose(net(image), net(rolled), atol=1e-4)
    assert isinstance(net.position_embed, nn.Parameter)
    nn.init.zeros_(net.position_embed)
    torch.testing.assert_close(net(image), net(rolled), atol=1e-5, rtol=1e-5)


def test_vit_positions_start_as_large_as_the_patches() -> None:
    # Patch of 2 * 2 pixels with standard deviation 1: torch draws 4 weights uniform in 1/2 of both signs (variance
    # 1/12 each) and a bias alike, so a value has variance 5/12, std 0.65.
    torch.manual_seed(0)
    net = ViT(num_classes=10, in_channels=1, image_size=8, patch_size=2, embed_dim=512, depth=1, num_heads=2)
    patches = net.patch_embed(draw_image(64, 1, 8, 8)).std().item()
    assert patches == pytest.approx(0.65, abs=0.05)
    assert net.position_embed.std().item() == pytest.approx(patches, rel=0.3)


def test_dropout_acts_in_training_only() -> None:
    net = MLP(num_classes=10, in_channels=1, image_size=8, dropout=0.5)
    image = draw_image(4, 1, 8, 8)
    assert not torch.equal(net.train()(image), net(image))
    assert torch.equal(net.eval()(image), net(image))


def test_resnet_widths_that_num_groups_does_not_divide_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        ResNet(num_classes=10, in_channels=1, widths=(32, 36, 20), num_groups=8)
    assert str(caught.value) == (
        "ResNet: every width must be a multiple of `num_groups`, got widths=[32, 36, 20] with num_groups=8. "
        "Allowed: a list of one or more of 8, 16, 24, ... Change `widths`, or set `num_groups` to a common "
        "divisor of them."
    )


def test_resnet_without_widths_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"got widths=\[\] with num_groups=8\. Allowed: a list of one or more"):
        ResNet(num_classes=10, in_channels=1, widths=())


def test_vit_reports_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ViT(num_classes=10, in_channels=1, image_size=28, patch_size=8, embed_dim=50, depth=1, num_heads=4)
    assert str(caught.value) == (
        "ViT: `patch_size` must divide the image size 28, got 8. Allowed: [1, 2, 4, 7, 14, 28]. "
        "Set `patch_size` to one of these.\n"
        "ViT: `embed_dim` must be a multiple of `num_heads`, got embed_dim=50 with num_heads=4. "
        "Allowed num_heads for 50: [1, 2, 5, 10, 25, 50]. Set `num_heads` to one of these or `embed_dim` "
        "to 52."
    )


def test_patch_larger_than_the_image_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must divide the image size 8, got 16"):
        ViT(num_classes=10, in_channels=1, image_size=8, patch_size=16, embed_dim=8, depth=1, num_heads=2)
