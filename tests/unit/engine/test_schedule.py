"""Schedules: torch's own where there is one, and exact peaks and ends for any number of steps."""

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from leyden.engine.schedule import Constant, Cosine, OneCycle, Schedule

TOTALS = [1, 2, 3, 4, 5, 10, 17, 100, 101, 999, 1000, 1001]


def factors(schedule: Schedule, total_steps: int) -> list[float]:
    return [schedule.factor(step, total_steps) for step in range(total_steps)]


def torch_rates(build: Any, total_steps: int, lr: float = 1.0) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = build(optimizer)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("total_steps", [2, 3, 10, 100, 101])
@pytest.mark.parametrize("final_frac", [0.0, 0.1])
def test_cosine_is_torchs(total_steps: int, final_frac: float) -> None:
    expected = torch_rates(lambda o: CosineAnnealingLR(o, T_max=total_steps - 1, eta_min=final_frac), total_steps)
    assert factors(Cosine(final_frac=final_frac), total_steps) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(10, 3), (100, 30), (101, 1), (1000, 250), (5, 3)])
@pytest.mark.parametrize(("initial_frac", "final_frac"), [(0.04, 0.0), (0.5, 0.01)])
def test_one_cycle_is_torchs(total_steps: int, warmup_steps: int, initial_frac: float, final_frac: float) -> None:
    def build(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=total_steps,
            pct_start=(warmup_steps + 1) / total_steps,  # torch's first phase ends at pct_start * total_steps - 1
            div_factor=1 / initial_frac,
            final_div_factor=initial_frac / final_frac if final_frac else 1e30,
            cycle_momentum=False,
        )

    schedule = OneCycle(warmup_steps=warmup_steps, warmup_frac=0.0, initial_frac=initial_frac, final_frac=final_frac)
    expected = torch_rates(build, total_steps)
    assert factors(schedule, total_steps) == pytest.approx(expected, abs=1e-7)


def test_warm_up_is_linear() -> None:
    # Four steps of warm-up: 1/5, 2/5, 3/5, 4/5, then the peak.
    assert factors(Constant(warmup_steps=4), 7) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_cosine_after_warm_up_by_hand() -> None:
    # Peak at step 1, last step 5: (1 + cos(pi * k / 4)) / 2 for k = 0 .. 4.
    root = math.sqrt(0.5)
    expected = [0.5, 1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0]
    assert factors(Cosine(warmup_steps=1), 6) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("total_steps", TOTALS)
@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 50, 5000, 0.01, 0.1, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["constant", "cosine", "one_cycle"])
def test_peak_and_end_are_exact(total_steps: int, warmup: float, kind: str) -> None:
    sizes: dict[str, Any] = {
        "warmup_steps": warmup if isinstance(warmup, int) else 0,
        "warmup_frac": warmup if isinstance(warmup, float) else 0.0,
    }
    final_frac = 0.125
    schedule: Schedule = {
        "constant": lambda: Constant(**sizes),
        "cosine": lambda: Cosine(**sizes, final_frac=final_frac),
        "one_cycle": lambda: OneCycle(**sizes, final_frac=final_frac),
    }[kind]()
    found = factors(schedule, total_steps)
    peak = schedule.num_warmup_steps(total_steps)
    assert found[peak] == 1.0
    assert max(found) == 1.0
    assert all(0 < value <= 1 for value in found)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    if peak < total_steps - 1:  # where warm-up takes all steps but one, that one is the peak
        assert found[-1] == (1.0 if kind == "constant" else final_frac)


@pytest.mark.parametrize("schedule", [Cosine(final_frac=0.2), OneCycle(final_frac=0.2)])
def test_steps_beyond_the_plan_keep_the_final_value(schedule: Schedule) -> None:
    assert [schedule.factor(step, 10) for step in (9, 10, 11, 1000)] == [0.2] * 4


def test_warm_up_in_steps_and_as_a_share() -> None:
    assert Constant(warmup_steps=7).num_warmup_steps(100) == 7
    assert Constant(warmup_frac=0.07).num_warmup_steps(100) == 7
    assert OneCycle().num_warmup_steps(100) == 30  # 0.3 of 100
    # A share never takes the last step, where the peak would be.
    assert Constant(warmup_frac=0.999).num_warmup_steps(100) == 99


def test_one_cycle_starts_at_its_initial_share() -> None:
    assert OneCycle(initial_frac=0.04).factor(0, 100) == pytest.approx(0.04, abs=1e-15)
    assert OneCycle(warmup_frac=0.0).factor(0, 100) == 1.0  # no warm-up


def test_both_kinds_of_warm_up_are_a_problem() -> None:
    (problem,) = OneCycle.config_problems({"warmup_steps": 3, "warmup_frac": 0.3})
    assert problem.format(key="schedule") == (
        "`schedule.warmup_steps` and `schedule.warmup_frac` both ask for warm-up. Set one of them to 0."
    )


@pytest.mark.parametrize(
    "values", [{}, {"warmup_steps": 3, "warmup_frac": 0.0}, {"warmup_steps": 0, "warmup_frac": 0.3}]
)
def test_one_kind_of_warm_up_is_not(values: dict[str, Any]) -> None:
    assert Schedule.config_problems(values) == []
