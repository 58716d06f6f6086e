"""The proof that a run which is killed and resumed ends as one that is not, to the last bit."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leyden.callbacks.trace import read_trace
from leyden.engine.checkpoint import read_checkpoint
from leyden.errors import ConfigError, TrainingError

FILES = ("metrics.json", "history.csv")
KILL = "++callbacks.trace.kill_at_step"


@dataclass
class Proof:
    """What differs between a run that went straight through and one that was killed and resumed.

    Attributes:
        num_steps: optimiser steps of the straight run.
        kills: steps before which the other run was killed.
        resumed_from: steps that its resumes went on from.
        weight_difference: largest absolute difference of a weight (averaged ones too) at the end.
        differing_steps: steps whose loss, rate or samples differ, or which only one run has.
        miscounted: (epoch, sample) pairs that the killed run did not count just as often as the straight one.
        differing_files: files of final values that are not equal, byte for byte.
    """

    num_steps: int
    kills: list[int] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    weight_difference: float = 0.0
    differing_steps: list[int] = field(default_factory=list)
    num_samples: int = 0
    miscounted: int = 0
    differing_files: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return not (self.weight_difference or self.differing_steps or self.miscounted or self.differing_files)

    def table(self) -> Table:
        """The proof for people."""
        table = Table(title="Killed and resumed, against straight through", title_justify="left")
        table.add_column("what")
        table.add_column("found", justify="right")
        table.add_column("exact", justify="center")
        miscounted = f"{self.miscounted} of {self.num_samples}"
        steps = ", ".join(map(str, self.differing_steps[:5])) + (" ..." if len(self.differing_steps) > 5 else "")
        kills = zip(self.kills, self.resumed_from, strict=True)
        rows: list[tuple[str, str, bool | None]] = [
            ("optimiser steps", str(self.num_steps), None),
            ("killed before step -> went on from step", ", ".join(f"{k} -> {r}" for k, r in kills), None),
            ("largest weight difference", f"{self.weight_difference:g}", self.weight_difference == 0),
            ("differing steps (loss, rate, samples)", steps or "0", not self.differing_steps),
            (
                "samples counted otherwise, of all epochs",
                miscounted,
                not self.miscounted,
            ),
            ("differing files", ", ".join(self.differing_files) or "none", not self.differing_files),
        ]
        for what, found, exact in rows:
            table.add_row(what, found, "" if exact is None else "[green]yes[/]" if exact else "[red]NO[/]")
        return table


def prove_resume(overrides: list[str], kills: int, folder: Path, seed: int | None = None) -> Proof:
    """Trains an experiment twice, once killed by SIGKILL before random steps and resumed each time, and compares.

    Args:
        overrides: the command line of the experiment.
        kills: how often the second run is killed.
        folder: where the two runs go.
        seed: of the choice of steps; None takes another one each time.

    Raises:
        ConfigError: when a run does not take more steps than it is to be killed.
        TrainingError: when a run fails.
    """
    choice = random.Random(seed)
    common = [*overrides, "+callbacks.trace._target_=leyden.callbacks.trace.Trace", "callbacks.progress=null"]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("straight run", total=kills + 2)
        straight = run_training(common, folder / "straight")
        trace = read_trace(straight / "trace.jsonl")
        proof = Proof(len(trace), num_samples=sum(len(row["samples"]) for row in trace))
        if len(trace) <= kills:
            raise ConfigError(f"The run takes {len(trace)} steps, too few for {kills} kills. Use fewer --kills.")
        proof.kills = sorted(choice.sample(range(1, len(trace)), kills))
        # States within epochs, at steps that have nothing to do with those of the kills
        saves = f"callbacks.checkpoint.every_n_steps={choice.randint(2, 10)}"
        # Where threads are chosen by measuring, two runs may choose differently
        threads = json.loads((straight / "run.json").read_text(encoding="utf-8"))["num_threads"]
        common.append(f"hardware.num_threads={threads}")
        killed: Path | None = None
        for number, step in enumerate(proof.kills):
            progress.update(bar, advance=1, description=f"kill {number + 1} of {kills}, before step {step}")
            arguments = [f"resume={killed}"] if killed else [*common, saves]
            killed = run_training([*arguments, f"{KILL}={step}"], folder / "killed", killed, dies=True)
        progress.update(bar, advance=1, description="to the end")
        assert killed is not None
        run_training([f"resume={killed}", f"{KILL}=null"], folder / "killed", killed)
        progress.update(bar, advance=1)
    log = (killed / "train.log").read_text(encoding="utf-8")
    proof.resumed_from = [int(step) for step in re.findall(r"Resuming after \d+ epochs \(step (\d+)\)", log)]
    _compare(proof, straight, killed)
    return proof


class RefusedError(TrainingError):
    """A run was refused before it began; the message is the run's own."""


def run_training(arguments: list[str], outputs: Path, run: Path | None = None, dies: bool = False) -> Path:
    """Runs a training process and returns its run folder.

    Raises:
        RefusedError: where its config or the hardware does not allow it.
        TrainingError: where it ends otherwise than it should.
    """
    command = [sys.executable, "-m", "leyden.cli", "train", *arguments, f"paths.outputs='{outputs}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if (done.returncode == -9) != dies or (not dies and done.returncode != 0):
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        if last.startswith(("ConfigError: ", "HardwareError: ")):
            raise RefusedError(last.partition(": ")[2])
        raise TrainingError(
            f"`leyden train {' '.join(arguments)}` ended with {done.returncode}"
            f"{' before it could be killed' if dies else ''}:\n{(done.stdout + done.stderr).strip()[-2000:]}"
        )
    if run is not None:
        return run
    (record,) = outputs.rglob("run.json")
    return record.parent


def _compare(proof: Proof, straight: Path, killed: Path) -> None:
    before, after = (read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (straight, killed))
    for part in ("state_dict", "ema", "optimizer_states"):
        proof.weight_difference = max(proof.weight_difference, difference(before.get(part), after.get(part)))
    first, second = ({row["step"]: row for row in read_trace(run / "trace.jsonl")} for run in (straight, killed))
    proof.differing_steps = [step for step in sorted({*first, *second}) if first.get(step) != second.get(step)]
    counts = [Counter((row["epoch"], s) for row in trace.values() for s in row["samples"]) for trace in (first, second)]
    proof.miscounted = sum(((counts[0] - counts[1]) + (counts[1] - counts[0])).values())
    proof.differing_files = [name for name in FILES if (straight / name).read_bytes() != (killed / name).read_bytes()]


def difference(first: Any, second: Any) -> float:
    """The largest absolute difference of two nested states; infinite where they are not of one kind."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return float("inf")
        return 0.0 if torch.equal(first, second) else float((first.double() - second.double()).abs().max())
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return max((difference(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        return max((difference(a, b) for a, b in zip(first, second, strict=True)), default=0.0)
    if isinstance(first, int | float) and isinstance(second, int | float):
        return abs(first - second)
    return 0.0 if first == second else float("inf")
