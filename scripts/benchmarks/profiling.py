"""Where Leyden spends time beyond the loop by hand: cProfile of both, subtracted function by function."""

from __future__ import annotations

import pstats
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Options, leyden_command, raw_command, run_process

Function = tuple[str, int, str]


@dataclass(frozen=True)
class Cost:
    """What a function costs, per optimiser step.

    Attributes:
        name: `package/file.py:line function`.
        calls: in Leyden.
        own_us: own time in Leyden, in microseconds, beyond that in the loop by hand.
        total_us: with what it calls, in Leyden, in microseconds.
    """

    name: str
    calls: float
    own_us: float
    total_us: float


def name_of(function: Function) -> str:
    """A function's place from its package on."""
    file, line, name = function
    if file == "~":
        return name.strip("<>")
    parts = Path(file).parts
    after = parts.index("site-packages") + 1 if "site-packages" in parts else None
    if after is None and "src" in parts:
        after = parts.index("src") + 1
    return f"{'/'.join(parts[after:] if after else parts[-2:])}:{line} {name}"


def package_of(cost: Cost) -> str:
    """The package a function belongs to; `built-in` for functions in C."""
    found = re.match(r"(\w+)/", cost.name)
    return found.group(1) if found else "built-in"


def subtract(
    leyden: dict[Function, tuple[int, float, float]], raw: dict[Function, tuple[int, float, float]], num_steps: int
) -> list[Cost]:
    """Costs per step, the largest first; the values are (calls, own seconds, total seconds) of all steps."""
    costs = []
    for function in leyden.keys() | raw.keys():
        calls, own, total = leyden.get(function, (0, 0.0, 0.0))
        less = raw.get(function, (0, 0.0, 0.0))[1]
        scale = 1e6 / num_steps
        costs.append(Cost(name_of(function), calls / num_steps, (own - less) * scale, total * scale))
    return sorted(costs, key=lambda cost: -cost.own_us)


def load_profile(path: Path) -> dict[Function, tuple[int, float, float]]:
    """Calls, own and total seconds of each function."""
    stats: Any = pstats.Stats(str(path))
    return {function: (calls, own, total) for function, (_, calls, own, total, _) in stats.stats.items()}


def render(costs: list[Cost], by_hand_us: float, top: int = 25) -> str:
    """Tables in Markdown: packages, functions by own time, Leyden's own functions with what they call.

    Shares are of `by_hand_us`, a step of the loop by hand. At the end of the second table are functions that cost more
    in the loop by hand, which does the same work in other places.
    """
    above = sum(cost.own_us for cost in costs)
    packages: dict[str, float] = {}
    for cost in costs:
        packages[package_of(cost)] = packages.get(package_of(cost), 0.0) + cost.own_us
    rest = [cost for cost in costs[top:][-5:] if cost.own_us < 0]
    lines = [
        f"Beyond the loop by hand ({by_hand_us:.0f} us per step): {above:.0f} us per step. The profiler makes short "
        "functions slower; differences of built-in functions, which do the same work in both, are noise.",
        "",
        "| package | us per step | of a step by hand |",
        "|---|---:|---:|",
        *(f"| {n} | {us:.1f} | {us / by_hand_us:.1%} |" for n, us in sorted(packages.items(), key=lambda p: -p[1])[:8]),
        "",
        "| function | calls per step | own us per step beyond the loop by hand | of a step by hand |",
        "|---|---:|---:|---:|",
        *(f"| `{c.name}` | {c.calls:.2f} | {c.own_us:.1f} | {c.own_us / by_hand_us:.1%} |" for c in costs[:top] + rest),
        "",
        "| Leyden's function, with what it calls | calls per step | us per step |",
        "|---|---:|---:|",
    ]
    own = sorted((c for c in costs if package_of(c) == "leyden"), key=lambda c: -c.total_us)
    lines += [f"| `{c.name}` | {c.calls:.2f} | {c.total_us:.1f} |" for c in own[:top]]
    return "\n".join(lines)


def profile(work: str, options: Options) -> str:
    """Profiles Leyden and the loop by hand; returns tables in Markdown."""
    import json

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, ours, theirs = folder / "out.json", folder / "leyden.prof", folder / "raw.prof"
        run_process(raw_command("benchmarks.raw", work, options, out, "--profile", str(theirs)), folder)
        run_process(leyden_command(work, options, out, ours), folder)
        num_batches = json.loads(out.read_text(encoding="utf-8"))["num_batches"]
        num_steps, by_hand = options.epochs * num_batches, load_profile(theirs)
        by_hand_us = 1e6 / num_steps * sum(own for _, own, _ in by_hand.values())
        return render(subtract(load_profile(ours), by_hand, num_steps), by_hand_us)
