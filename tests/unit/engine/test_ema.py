"""The average of the weights: its arithmetic, when it is in the network, and what is in a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from leyden.engine.ema import WeightAverage, take_raw
from leyden.engine.settings import Engine


def walk(net: nn.Module, average: WeightAverage, steps: int) -> list[float]:
    """Adds 1 to every weight at each step; gives the average of the first after each."""
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 1
        average.update(step)
        average.swap_in()
        seen.append(float(next(net.parameters()).flatten()[0].detach()))
        average.swap_out()
    return seen


def zeros() -> nn.Linear:
    net = nn.Linear(2, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def test_arithmetic() -> None:
    # weights 1, 2, 3, 4: average 1; 0.75 + 2/4 = 1.25; 0.75 * 1.25 + 3/4 = 1.6875; 0.75 * 1.6875 + 1 = 2.265625
    net = zeros()
    assert walk(net, WeightAverage(net, 0.75, 0), 4) == [1.0, 1.25, 1.6875, 2.265625]
    assert net.weight.tolist() == [[4.0, 4.0]]


def test_before_the_start_the_weights_count() -> None:
    net = zeros()
    # the average starts with the weights after step 3
    assert walk(net, WeightAverage(net, 0.75, 2), 4) == [1.0, 2.0, 3.0, 0.75 * 3 + 0.25 * 4]


def test_averages_of_bfloat16_are_in_float32() -> None:
    net = zeros().bfloat16()
    average = WeightAverage(net, 0.75, 0)
    walk(net, average, 4)
    checkpoint = {"state_dict": {f"net.{n}": t for n, t in net.state_dict().items()}}
    average.save(checkpoint)
    assert checkpoint["state_dict"]["net.bias"].tolist() == [2.265625]  # 2.265625 has 9 bits, bfloat16 has 8


@pytest.mark.parametrize("is_in", [True, False])
def test_checkpoint_has_both(is_in: bool) -> None:
    """Also one that is written while the average is in the network, within validation."""
    net = nn.Sequential(zeros(), nn.BatchNorm1d(1))
    average = WeightAverage(net, 0.75, 0)
    walk(net, average, 4)
    if is_in:
        average.swap_in()
    checkpoint = copy.deepcopy({"state_dict": {f"net.{n}": t for n, t in net.state_dict().items()}})
    average.save(checkpoint)
    assert checkpoint["ema"]["weights"] == "ema"
    assert checkpoint["state_dict"]["net.0.bias"].tolist() == [2.265625]
    assert checkpoint["ema"]["raw"]["net.0.bias"].tolist() == [4.0]
    assert "net.1.running_mean" not in checkpoint["ema"]["raw"]

    again = nn.Sequential(zeros(), nn.BatchNorm1d(1))
    going_on = WeightAverage(again, 0.75, 0)
    going_on.load(checkpoint)
    take_raw(checkpoint)
    again.load_state_dict({name.removeprefix("net."): t for name, t in checkpoint["state_dict"].items()})
    assert again[0].bias.tolist() == [4.0]
    going_on.swap_in()
    assert again[0].bias.tolist() == [2.265625]


def test_checkpoint_before_the_start_says_so() -> None:
    net = zeros()
    average = WeightAverage(net, 0.75, 9)
    walk(net, average, 4)
    checkpoint = {"state_dict": {"net.bias": net.bias}}
    average.save(checkpoint)
    assert checkpoint == {"state_dict": {"net.bias": net.bias}, "ema": {"weights": "raw"}}


def test_shared_weights_are_saved_under_all_their_names() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    net[1].weight = net[0].weight
    average = WeightAverage(net, 0.75, 0)
    walk(net, average, 2)
    checkpoint = {"state_dict": {f"net.{n}": t for n, t in net.state_dict().items()}}
    average.save(checkpoint)
    assert set(checkpoint["state_dict"]) == {"net.0.weight", "net.1.weight"}
    assert checkpoint["state_dict"]["net.0.weight"].equal(checkpoint["state_dict"]["net.1.weight"])


def test_start_without_an_average_is_refused() -> None:
    (problem,) = Engine.config_problems({"ema_decay": None, "ema_start_step": 5})
    assert problem.format(key="engine") == (
        "`engine.ema_start_step` is 5, but nothing is averaged, since `engine.ema_decay` is null. "
        "Set engine.ema_decay=0.999, or engine.ema_start_step=0."
    )
    assert Engine.config_problems({"ema_decay": 0.9, "ema_start_step": 5}) == []
