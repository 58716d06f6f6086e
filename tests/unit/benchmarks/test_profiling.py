"""What lies between two profiles."""

from __future__ import annotations

import pytest

from benchmarks.profiling import name_of, package_of, render, subtract

LINEAR = ("~", 0, "<built-in method torch._C._nn.linear>")
HOOKS = ("/x/site-packages/lightning/pytorch/trainer/call.py", 163, "_call_hook")
STEP = ("/y/src/leyden/engine/task.py", 147, "training_step")


def test_costs_are_per_step_and_beyond_the_loop_by_hand() -> None:
    leyden = {LINEAR: (20, 0.003, 0.003), HOOKS: (5, 0.002, 0.004), STEP: (1, 0.001, 0.009)}
    raw = {LINEAR: (20, 0.002, 0.002)}
    costs = subtract(leyden, raw, num_steps=10)
    # own seconds / 10 steps in microseconds: 2 ms -> 200, 1 ms -> 100, 3 - 2 ms -> 100
    assert [round(cost.own_us) for cost in costs] == [200, 100, 100]
    assert costs[0].name == "lightning/pytorch/trainer/call.py:163 _call_hook"
    assert costs[0].calls == 0.5
    assert {package_of(cost) for cost in costs} == {"lightning", "leyden", "built-in"}
    text = render(costs, by_hand_us=800)
    assert "Beyond the loop by hand (800 us per step): 400 us per step" in text
    assert "| lightning | 200.0 | 25.0% |" in text
    assert "| `leyden/engine/task.py:147 training_step` | 0.10 | 900.0 |" in text


def test_functions_only_the_loop_by_hand_has_count_against_it() -> None:
    (cost,) = subtract({}, {LINEAR: (1, 0.001, 0.001)}, num_steps=1)
    assert cost.own_us == pytest.approx(-1000)


def test_names_start_with_the_package() -> None:
    assert name_of(STEP) == "leyden/engine/task.py:147 training_step"
    assert name_of(LINEAR) == "built-in method torch._C._nn.linear"
