"""The JSON of a benchmark and its arithmetic: medians, ratios, targets. Pure but for what describes the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Annotated

from annotated_types import Ge, Gt, MinLen
from pydantic import BaseModel, ConfigDict

from benchmarks.works import TITLES, WORKS, Target

ROOT = Path(__file__).parents[2]
PACKAGES = ("leyden", "torch", "lightning", "torchmetrics")

Seconds = Annotated[float, Ge(0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EpochTime(_Strict):
    """Times of one epoch (of one start in `startup`), in seconds; validation is not in the first two."""

    cpu_s: Seconds
    wall_s: Seconds
    validation_cpu_s: Seconds = 0.0
    validation_wall_s: Seconds = 0.0


class Measurement(_Strict):
    """What one process measured."""

    contender: str
    variant: str
    round: Annotated[int, Ge(0)]
    epochs: Annotated[list[EpochTime], MinLen(1)]
    num_batches: Annotated[int, Gt(0)] | None = None
    facts: dict[str, int] = {}


class Machine(_Strict):
    """Where it was measured."""

    cpu: str
    num_cores: int
    platform: str


class Results(_Strict):
    """A benchmark of one work: docs/benchmarks/<work>.json."""

    work: str
    machine: Machine
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    date: str
    epochs: int
    repeats: int
    limit_batches: int | None
    overrides: list[str] = []
    measurements: list[Measurement]


class Row(_Strict):
    """A line of the table; times are medians over the rounds.

    Attributes:
        contender: name.
        variant: the fastest of its ways.
        cpu_s, wall_s: of an epoch.
        validation_cpu_s: of the validation at its end.
        ratio: CPU time relative to the reference (`raw`, or `imports`), the median over the rounds.
    """

    contender: str
    variant: str
    cpu_s: float
    wall_s: float
    validation_cpu_s: float
    ratio: float | None


class Verdict(_Strict):
    """A target and what was measured: the median over the rounds; `holds` is None where a contender is missing."""

    text: str
    value: float | None
    holds: bool | None


def cpu_by_round(results: Results, contender: str) -> tuple[str, dict[int, float]]:
    """The fastest variant of a contender, and its CPU time of an epoch in each round; empty where it is missing."""
    variants: dict[str, dict[int, float]] = {}
    for found in results.measurements:
        if found.contender == contender:
            variants.setdefault(found.variant, {})[found.round] = mean(epoch.cpu_s for epoch in found.epochs)
    if not variants:
        return "", {}
    best = min(variants, key=lambda name: median(variants[name].values()))
    return best, variants[best]


def compare(results: Results, contender: str, against: str, kind: str = "ratio") -> float | None:
    """CPU time of a contender against another's: the median over the rounds of the quotient (or the difference).

    Pairs of one round were measured close to each other, so that a slower hour meets both.
    """
    _, ours = cpu_by_round(results, contender)
    _, theirs = cpu_by_round(results, against)
    rounds = sorted(set(ours) & set(theirs))
    if not rounds:
        return None
    return median(ours[r] / theirs[r] if kind == "ratio" else ours[r] - theirs[r] for r in rounds)


def build_rows(results: Results) -> list[Row]:
    """One row per contender that took part, in the order of the work."""
    contenders = WORKS[results.work].contenders
    reference = "raw" if "raw" in contenders else "imports"
    rows = []
    for contender in contenders:
        variant, cpu = cpu_by_round(results, contender)
        if not cpu:
            continue
        found = [m for m in results.measurements if (m.contender, m.variant) == (contender, variant)]
        rows.append(
            Row(
                contender=contender,
                variant=variant,
                cpu_s=median(cpu.values()),
                wall_s=median(mean(e.wall_s for e in m.epochs) for m in found),
                validation_cpu_s=median(mean(e.validation_cpu_s for e in m.epochs) for m in found),
                ratio=compare(results, contender, reference),
            )
        )
    return rows


def judge(results: Results) -> list[Verdict]:
    """Which targets hold. A bound is kept at equality, but `faster` means faster."""

    def verdict(target: Target) -> Verdict:
        value = compare(results, target.contender, target.against, target.kind)
        if value is None:
            return Verdict(text=target.text, value=None, holds=None)
        holds = value < 1.0 if target.at_most == 1.0 else value <= target.at_most
        return Verdict(text=target.text, value=value, holds=holds)

    return [verdict(target) for target in WORKS[results.work].targets]


def title_of(row: Row) -> str:
    """A row's name for people."""
    title = TITLES[row.contender]
    return title if row.variant == "plain" else f"{title} ({row.variant})"


def describe_machine() -> Machine:
    """Name of the processor, cores, system."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.is_file()
        else []
    )
    return Machine(
        cpu=names[0] if names else platform.processor() or platform.machine(),
        num_cores=os.cpu_count() or 1,
        platform=platform.platform(),
    )


def describe_code() -> tuple[str | None, bool | None]:
    """Commit of the code, and whether it has changes; None outside a repository."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--", "src", "conf", "scripts", "train.py")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def installed_versions() -> dict[str, str]:
    """Versions of what is measured."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is not installed
            continue
    return found


def today() -> str:
    """The date, as in 2026-01-31."""
    return datetime.now(UTC).date().isoformat()
