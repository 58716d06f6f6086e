"""How a network is cut, and what is refused; training with it is in tests/integration/test_parallel.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from leyden.engine.parallel import check_sharding, plan_of
from leyden.engine.settings import PLAIN_STEP
from leyden.errors import ConfigError
from leyden.nets.transformer import TransformerBlock
from leyden.nlp.nets import NgramBag, TransformerEncoder
from leyden.regression import nets as table_nets
from leyden.sharding import deal_rows, total_norm
from leyden.vision.nets import MLP, ViT

TEXT = {"num_classes": 3, "vocab_size": 9, "embed_dim": 12, "depth": 1}
BLOCK = {"qkv": "qkv", "attention_out": "row", "mlp.0": "column", "mlp.2": "dropout", "mlp.3": "row"}


def test_rows_are_dealt_to_processes_and_back() -> None:
    """Two processes: rows of queries 0-3, keys 10-13, values 20-23; the first has the first half of each."""
    rows = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])[:, None]
    dealt = deal_rows(rows, 3, 2)
    assert dealt.flatten().tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    assert torch.equal(deal_rows(dealt, 2, 3), rows)


def test_a_process_with_half_of_the_heads_gives_half_of_the_attention() -> None:
    """The sum over two processes, each with its dealt half of the weights, is what one process computes."""
    torch.manual_seed(0)
    block = TransformerBlock(embed_dim=12, num_heads=4, mlp_dim=8, dropout=0.0).double()
    features = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = block._attend(features, None)
    total = block.attention_out.bias.detach().expand_as(expected).clone()
    for rank in range(2):
        half = TransformerBlock(embed_dim=12, num_heads=4, mlp_dim=8, dropout=0.0).double()
        half.qkv.weight = nn.Parameter(deal_rows(block.qkv.weight, 3, 2).chunk(2)[rank])
        half.qkv.bias = nn.Parameter(deal_rows(block.qkv.bias, 3, 2).chunk(2)[rank])
        half.attention_out.weight = nn.Parameter(block.attention_out.weight.chunk(2, dim=1)[rank])
        half.attention_out.bias = None
        total += half._attend(features, None)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)


class Planned(nn.Sequential):
    """A network with a plan of a user's."""

    def __init__(self, plan: Any) -> None:
        super().__init__(nn.GELU(), nn.Linear(2, 2))
        self.plan = plan

    def parallel_plan(self) -> Any:
        return self.plan


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (TransformerEncoder(**TEXT), {f"blocks.0.{name}": cut for name, cut in BLOCK.items()}),
        (
            ViT(3, 1, 8, patch_size=4, embed_dim=8, depth=1, num_heads=2),
            {f"blocks.0.{name}": cut for name, cut in BLOCK.items()},
        ),
        # Of three layers in a row the third stays whole
        (MLP(3, 1, 8, hidden_dims=[6, 4]), {"hidden.1": "column", "hidden.3": "dropout", "hidden.4": "row"}),
        (table_nets.MLP(5, 1, num_layers=1), {"body.0": "column", "body.2": "dropout", "head": "row"}),
        (
            table_nets.MLP(5, 1, num_layers=3),
            {
                "body.0": "column",
                "body.2": "dropout",
                "body.3": "row",
                "body.6": "column",
                "body.8": "dropout",
                "head": "row",
            },
        ),
    ],
    ids=["TransformerEncoder", "ViT", "MLP", "table MLP of 1", "table MLP of 3"],
)
def test_plans_name_the_layers_that_are_cut(net: nn.Module, expected: dict[str, str]) -> None:
    assert plan_of(net) == expected
    for name, cut in expected.items():
        assert isinstance(net.get_submodule(name), nn.Dropout if cut == "dropout" else nn.Linear)


@pytest.mark.parametrize(
    ("net", "engine", "data_size", "tensor_size", "words"),
    [
        (
            NgramBag(3, 9),
            {},
            1,
            2,
            "`hardware.strategy` is tensor parallel, but `model.net` (leyden.nlp.nets.NgramBag) does not say how it is "
            'cut. Give the class a method parallel_plan() that names its Linears, e.g. {"first": "column", ',
        ),
        (
            TransformerEncoder(**TEXT, num_heads=3),
            {},
            1,
            2,
            "2 tensor parallel processes cannot share the 3 attention heads of `blocks.0.qkv` in `model.net` "
            "(leyden.nlp.nets.TransformerEncoder) evenly. Change model.net.num_heads to a multiple of 2",
        ),
        (MLP(3, 1, 8, hidden_dims=[7]), {}, 1, 2, "cannot share the 7 outputs of `hidden.1`"),
        (Planned({"first": "column"}), {}, 1, 2, "names `first` as 'column', which must be a Linear, but is not there"),
        (Planned({"0": "row"}), {}, 1, 2, "names `0` as 'row', which must be a Linear, but is a GELU"),
        (Planned({"1": "dropout"}), {}, 1, 2, "names `1` as 'dropout', which must be a Dropout, but is a Linear"),
        (NgramBag(3, 9), {"compile": "default"}, 2, 1, "`engine.compile` is default"),
        (NgramBag(3, 9), {"precision": "16-mixed"}, 2, 1, "`engine.precision` is 16-mixed"),
        (NgramBag(3, 9), {"micro_batch_size": 1}, 2, 1, "`engine.micro_batch_size` is 1"),
        (nn.Sequential(nn.BatchNorm1d(3)), {}, 2, 1, "has a BatchNorm (`0`), whose running statistics would differ"),
    ],
    ids=[
        "no plan",
        "heads",
        "width",
        "no module",
        "no Linear",
        "no Dropout",
        "compile",
        "16-mixed",
        "micro-batch",
        "BatchNorm",
    ],
)
def test_what_cannot_be_cut_is_refused(
    net: nn.Module, engine: dict[str, Any], data_size: int, tensor_size: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sharding(net, dataclasses.replace(PLAIN_STEP, **engine), data_size, tensor_size)
    assert words in str(caught.value)


def test_total_norm_of_whole_tensors() -> None:
    assert total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]).item() == 5.0
