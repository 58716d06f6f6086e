"""Optimisers of our own, and what an optimiser takes from a checkpoint."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden.engine.optim import Muon, build_optimizer, take_up


def build_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 6), "conv": nn.Conv1d(1, 2, 3), "head": nn.Linear(6, 3)}
    )


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, start: int = 0, schedule: Any = None
) -> None:
    for step in range(start, start + num_steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def names_of(net: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, parameter in net.named_parameters() if any(parameter is other for other in group["params"])}


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert one.equal(other), name


def test_inner_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    net = build_net()
    muon, adamw = Muon(net.named_parameters()).param_groups
    assert names_of(net, muon) == {"body.weight"}
    assert "momentum" in muon
    assert names_of(net, adamw) == {
        "embed.weight",
        "body.bias",
        "conv.weight",
        "conv.bias",
        "head.weight",
        "head.bias",
    }
    assert "betas" in adamw


def test_words_choose_what_goes_to_adamw() -> None:
    net = build_net()
    muon, _ = Muon(net.named_parameters(), adamw_names=("body",)).param_groups
    assert names_of(net, muon) == {"embed.weight", "head.weight"}


@pytest.mark.parametrize("adamw_lr", [None, 0.005])
def test_steps_are_those_of_torchs_two_optimisers(adamw_lr: float | None) -> None:
    ours, theirs = build_net(), build_net()
    train(ours, Muon(ours.named_parameters(), lr=0.02, weight_decay=0.1, momentum=0.9, adamw_lr=adamw_lr), 3)

    matrix = theirs["body"].weight  # type: ignore[index, union-attr]
    others = [parameter for parameter in theirs.parameters() if parameter is not matrix]
    muon = torch.optim.Muon([matrix], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=adamw_lr or 0.02, weight_decay=0.1)
    for step in range(3):
        train(theirs, muon, 1, start=step)
        adamw.step()
    assert_equal(ours, theirs)


def test_update_has_the_size_of_adamws() -> None:
    """`match_rms_adamw` scales an orthogonal update to a root mean square of 0.2 lr (Liu et al. 2025, 2502.16982)."""
    net = nn.Linear(64, 32, bias=False)
    before = net.weight.detach().clone()
    train(net, Muon(net.named_parameters(), lr=0.01, weight_decay=0.0), 1)
    rms = (net.weight.detach() - before).square().mean().sqrt()
    # Five Newton-Schulz iterations give singular values of 0.7 .. 1.2, not exactly 1.
    assert 0.7 * 0.002 < float(rms) < 1.2 * 0.002


def test_schedule_changes_both_parts() -> None:
    net = build_net()
    optimizer = Muon(net.named_parameters(), lr=0.1, adamw_lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(net, optimizer, 2, schedule=schedule)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 / 4, 0.01 / 4])

    # A rate of zero reaches the parts themselves: nothing moves any more.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(net)
    train(net, optimizer, 1)
    assert_equal(net, before)


def test_state_goes_to_a_file_and_back() -> None:
    straight, resumed = build_net(), build_net()
    optimizer = Muon(straight.named_parameters(), lr=0.02)
    train(straight, optimizer, 3)

    first = Muon(resumed.named_parameters(), lr=0.02)
    train(resumed, first, 3)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "net": resumed.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    # Other weights and another rate: all must come from the file.
    fresh = build_net()
    second = Muon(fresh.named_parameters(), lr=0.5)
    train(fresh, second, 1, start=77)
    fresh.load_state_dict(saved["net"])
    second.load_state_dict(saved["optimizer"])

    train(straight, optimizer, 3, start=3)
    train(fresh, second, 3, start=3)
    assert_equal(straight, fresh)


def test_schedule_still_reaches_the_parts_after_loading() -> None:
    net = build_net()
    optimizer = Muon(net.named_parameters(), lr=0.02)
    train(net, optimizer, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(net)
    train(net, optimizer, 1, start=1)
    assert_equal(net, before)


def test_copy_trains_on_its_own() -> None:
    net = build_net()
    optimizer = Muon(net.named_parameters(), lr=0.02)
    train(net, optimizer, 1)
    other_net, other = copy.deepcopy((net, optimizer))
    train(net, optimizer, 1, start=1)
    train(other_net, other, 1, start=1)
    assert_equal(net, other_net)


def test_closure_is_called_once_with_gradients_on() -> None:
    net = build_net()
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return torch.tensor(1.5)

    with torch.no_grad():
        loss = Muon(net.named_parameters()).step(closure)
    assert calls == [True]
    assert loss == 1.5


@pytest.mark.parametrize(
    ("net", "kinds"), [(nn.Linear(3, 2, bias=False), ["momentum"]), (nn.LayerNorm(3), ["betas"])], ids=["muon", "adamw"]
)
def test_one_kind_of_parameters_is_enough(net: nn.Module, kinds: list[str]) -> None:
    optimizer = Muon(net.named_parameters())
    assert [kind for group in optimizer.param_groups for kind in ("momentum", "betas") if kind in group] == kinds
    before = copy.deepcopy(net)
    train(net, optimizer, 1)
    assert not next(net.parameters()).equal(next(before.parameters()))


def test_built_optimiser_knows_trainable_parameters_by_name() -> None:
    net = build_net()
    net["conv"].requires_grad_(False)  # type: ignore[index]
    optimizer = build_optimizer(lambda params: torch.optim.SGD(params, lr=0.1), net)
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["embed.weight", "body.weight", "body.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("fused", [True, False])
def test_state_from_a_file_takes_the_layout_of_its_weights(fused: bool) -> None:
    """A fused optimiser would pair the wrong elements; the expected weights are those of a run in one layout."""
    gradients = torch.randn(2, 6, 4, 3, 3, generator=torch.Generator().manual_seed(1))

    def step(weight: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
        weight.grad = gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()

    def start(layout: torch.memory_format) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)
        parameter = nn.Parameter(weight)
        return parameter, torch.optim.AdamW([parameter], lr=0.1, fused=fused)

    straight, optimizer = start(torch.contiguous_format)
    step(straight, optimizer, gradients[0])
    file = io.BytesIO()
    torch.save({"weight": straight.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    step(straight, optimizer, gradients[1])

    resumed, other = start(torch.channels_last)
    resumed.data.copy_(saved["weight"])
    other.load_state_dict(saved["optimizer"])
    take_up(other, None)
    step(resumed, other, gradients[1].contiguous(memory_format=torch.channels_last))
    assert resumed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(resumed, straight)


def test_settings_of_the_run_replace_those_of_a_file() -> None:
    net = build_net()
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in net.parameters()], lr=0.5)
    rates = [0.1 * index for index in range(len(optimizer.param_groups))]
    take_up(optimizer, None)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    take_up(optimizer, [{"lr": rate} for rate in rates])
    assert [group["lr"] for group in optimizer.param_groups] == rates
