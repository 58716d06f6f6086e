"""Networks for tables: shapes and sizes by arithmetic, rows that do not see each other."""

import pytest
import torch
from torch import nn

from leyden.regression.nets import MLP, Linear


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(
    ("net", "num_parameters"),
    [
        (Linear(9, 1), 10),  # 9 + 1
        (Linear(4, 3), 15),  # 4 * 3 + 3
        (MLP(9, 1, hidden_dim=64, num_layers=2), 4865),  # 9*64+64 + 64*64+64 + 64+1
        (MLP(4, 3, hidden_dim=5, num_layers=1), 43),  # 4*5+5 + 5*3+3
    ],
)
def test_shape_and_number_of_parameters(net: nn.Module, num_parameters: int) -> None:
    num_features = next(net.parameters()).shape[1]
    output = net(torch.randn(6, num_features))
    assert output.shape == (6, {10: 1, 15: 3, 4865: 1, 43: 3}[num_parameters])
    assert count_parameters(net) == num_parameters


def test_linear_is_a_matrix_product() -> None:
    net = Linear(3, 2)
    features = torch.randn(4, 3)
    torch.testing.assert_close(net(features), features @ net.head.weight.T + net.head.bias)


def test_mlp_by_hand() -> None:
    torch.manual_seed(0)
    net = MLP(3, 2, hidden_dim=4, num_layers=2)
    (first, _, _, second, _, _) = net.body
    features = torch.randn(5, 3)
    hidden = nn.functional.gelu(features @ first.weight.T + first.bias)
    hidden = nn.functional.gelu(hidden @ second.weight.T + second.bias)
    torch.testing.assert_close(net(features), hidden @ net.head.weight.T + net.head.bias)


def test_dropout_works_in_training_only() -> None:
    torch.manual_seed(0)
    net = MLP(3, 1, hidden_dim=32, dropout=0.5)
    features = torch.randn(5, 3)
    assert not net(features).equal(net(features))
    net.eval()
    assert net(features).equal(net(features))
