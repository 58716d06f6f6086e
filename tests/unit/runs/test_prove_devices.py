"""Which ways are compared, and what counts as equal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

from leyden.errors import ConfigError
from leyden.runs.prove_devices import DeviceProof, Found, Way, compare, list_ways, random_draws

WAY = Way("ddp_cpu 2", (), 2)


def found(**changes: Any) -> Found:
    values: dict[str, Any] = {
        "losses": [2.0, 1.0],
        "weights": {"net.a": torch.tensor([1.0, -4.0]), "net.b": torch.tensor([0.0])},
        "metrics": {"val/r2": 0.12342, "test/loss": 1.0},
        "orders": ["epoch 0: 9 samples, hash abc"],
        "parameter_bytes": [12, 12],
        "part_fracs": [math.nan, math.nan],
        "bytes_per_step": [12.0, 12.0],
    }
    return Found(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "is_equal", "loss", "weight"),
    [
        ({}, True, 0.0, 0.0),
        ({"losses": [2.0, 1.000001]}, True, 1e-6, 0.0),
        ({"losses": [2.0, 1.001]}, False, 1e-3, 0.0),
        ({"losses": [2.0]}, False, float("inf"), float("inf")),  # a step less
        # relative to the largest weight of the tensor
        ({"weights": {"net.a": torch.tensor([1.4, -4.0]), "net.b": torch.tensor([0.0])}}, False, 0.0, 0.1),
        ({"metrics": {"val/r2": 0.12344, "test/loss": 1.0}}, True, 0.0, 0.0),  # 0.1234 both
        ({"metrics": {"val/r2": 0.12352, "test/loss": 1.0}}, False, 0.0, 0.0),
        ({"metrics": {"val/r2": 0.12342}}, False, 0.0, 0.0),
        ({"orders": ["epoch 0: 9 samples, hash abd"]}, False, 0.0, 0.0),
    ],
)
def test_what_counts_as_equal(changes: dict[str, Any], is_equal: bool, loss: float, weight: float) -> None:
    comparison = compare(WAY, found(), found(**changes))
    assert comparison.is_equal == is_equal
    assert comparison.loss_difference == pytest.approx(loss, rel=1e-3)
    assert comparison.weight_difference == pytest.approx(weight, rel=1e-3)
    assert DeviceProof(found(), [comparison]).all_equal == is_equal


def test_table_fits_into_80_columns_and_names_shares() -> None:
    way = Way("tensor_parallel_cpu 2", (), 2)
    changes = {"parameter_bytes": [926_000, 925_000], "part_fracs": [0.5, 0.5], "bytes_per_step": [30.9e6] * 2}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(DeviceProof(found(), [compare(way, found(), found(**changes))]).table())
    row = next(line.split() for line in console.export_text().splitlines() if "tensor" in line)
    assert row == ["tensor_parallel_cpu", "2", "0e+00", "0e+00", "equal", "equal", "926.0", "kB", "50", "%", "30.9",
                   "MB", "yes"]  # fmt: skip


def test_nothing_compared_proves_nothing() -> None:
    assert not DeviceProof(found(), [], {"fsdp_cpu 2": "it has BatchNorm"}).all_equal


def test_ways_are_all_pairs_but_those_of_one_process() -> None:
    ways = list_ways(["ddp_cpu", "fsdp_cpu"], [1, 2, 3])
    assert [(way.overrides[0], way.devices) for way in ways] == [
        ("hardware=ddp_cpu", 2),
        ("hardware=ddp_cpu", 3),
        ("hardware=fsdp_cpu", 2),
        ("hardware=fsdp_cpu", 3),
    ]


@pytest.mark.parametrize(("strategies", "devices"), [(["gpu"], [2]), ([], [2]), (["ddp_cpu"], [0]), (["ddp_cpu"], [])])
def test_ways_that_are_not_there(strategies: list[str], devices: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"--strategies|--devices"):
        list_ways(strategies, devices)


def test_what_each_process_draws_is_switched_off() -> None:
    cfg = OmegaConf.create(
        {
            "data": {"augment": {"affine": {"degrees": 3}, "flip": None}},
            "model": {"net": {"dropout": 0.1, "attention_dropout": 0.2, "dropout_kind": "x", "other_dropout": 0.0}},
        }
    )
    assert random_draws(cfg) == [
        "data.augment.affine=null",
        "model.net.dropout=0.0",
        "model.net.attention_dropout=0.0",
    ]
    assert random_draws(OmegaConf.create({"data": {}, "model": {"net": {"hidden_dim": 3}}})) == []
