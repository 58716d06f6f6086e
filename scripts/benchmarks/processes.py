"""Runs each measurement in a process of its own, on one thread, with a terminal as its output."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.works import PLAIN, WARMUP_EPOCHS, WORKS

SCRIPTS = Path(__file__).parents[1]
TRAIN = SCRIPTS.parent / "train.py"
IMPORTS = "import sys, torch, lightning.pytorch, torchmetrics; from benchmarks.clock import write_stamp"


class MeasurementError(RuntimeError):
    """A contender's process failed."""


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        epochs: epochs that count, after the warm-up.
        repeats: rounds; in each, every contender has its turn.
        contenders: names of those that take part; None is all of the work.
        limit_batches: batches of an epoch; None is all.
        keras_python: interpreter with keras and tensorflow.
        overrides: further overrides of the experiment, for every contender that knows it.
        data_dir: folder of downloaded data.
    """

    epochs: int = 2
    repeats: int = 3
    contenders: tuple[str, ...] | None = None
    limit_batches: int | None = None
    keras_python: str = sys.executable
    overrides: tuple[str, ...] = ()
    data_dir: str = "data"


@dataclass(frozen=True)
class Turn:
    """One process to measure."""

    contender: str
    variant: str
    round: int


def plan_turns(work: str, options: Options) -> list[Turn]:
    """The order of the processes: A B A B ..., so that a change of the machine's speed meets all of them."""
    taking_part = {
        name: variants
        for name, variants in WORKS[work].contenders.items()
        if options.contenders is None or name in options.contenders
    }
    return [
        Turn(name, variant, number)
        for number in range(options.repeats)
        for name, variants in taking_part.items()
        for variant in variants
    ]


def leyden_overrides(work: str, options: Options) -> list[str]:
    """The overrides that make Leyden's run comparable; nothing that it does beside training is switched off."""
    data_dir = os.path.abspath(options.data_dir)
    return [
        *WORKS[work].overrides,
        "hardware=cpu",
        "hardware.num_threads=1",
        f'paths.data="{data_dir}"',
        *options.overrides,
    ]


def leyden_command(work: str, options: Options, out: Path, profile: Path | None = None) -> list[str]:
    """The command line of a measured run."""
    epochs = WARMUP_EPOCHS + options.epochs
    timer = {"_target_": "benchmarks.timer.EpochTimer", "path": f'"{out}"', "warmup_epochs": WARMUP_EPOCHS}
    if profile is not None:
        timer["profile"] = f'"{profile}"'
    limit = [] if options.limit_batches is None else [f"trainer.limit_train_batches={options.limit_batches}"]
    return [
        sys.executable,
        str(TRAIN),
        *leyden_overrides(work, options),
        f"trainer.max_epochs={epochs}",
        *limit,
        *(f"+callbacks.timer.{name}={value}" for name, value in timer.items()),
    ]


def raw_command(module: str, work: str, options: Options, out: Path, *flags: str) -> list[str]:
    """The command line of a contender that takes the experiment's parts."""
    overrides = [f"--override={override}" for override in leyden_overrides(work, options)[len(WORKS[work].overrides) :]]
    return [sys.executable, "-m", module, work, str(out), *_epochs(options), *overrides, *flags]


def build_command(work: str, turn: Turn, options: Options, out: Path, arrays: Path) -> list[str]:
    """The command line of a turn."""
    if work == "startup":
        if turn.contender == "imports":
            return [sys.executable, "-c", f"{IMPORTS}; write_stamp(sys.argv[1])", str(out)]
        stamp = ("+callbacks.stamp._target_=benchmarks.timer.FirstStep", f'+callbacks.stamp.path="{out}"')
        return [sys.executable, str(TRAIN), *leyden_overrides(work, options), *stamp]
    match turn.contender:
        case "leyden":
            return leyden_command(work, options, out)
        case "raw":
            flags = ["--channels-last"] if turn.variant == "channels_last" else []
            return raw_command("benchmarks.raw", work, options, out, *flags)
        case "floor":
            return raw_command("benchmarks.floor", work, options, out)
        case "keras1" | "keras32":
            steps = turn.contender.removeprefix("keras")
            flags = ["--steps-per-execution", steps, "--dtype", turn.variant, *_epochs(options)]
            return [options.keras_python, "-m", "benchmarks.keras_mlp", str(arrays), str(out), *flags]
        case "lightning":
            flags = ["--num-workers", turn.variant.split()[0], *_epochs(options)]
            return [sys.executable, "-m", "benchmarks.lightning_mlp", str(arrays), str(out), *flags]
    raise AssertionError(turn)


def _epochs(options: Options) -> list[str]:
    limit = [] if options.limit_batches is None else ["--limit-batches", str(options.limit_batches)]
    return ["--epochs", str(options.epochs), *limit]


def write_arrays(work: str, options: Options, path: Path) -> None:
    """Writes the training images for contenders that do not know Leyden's data."""
    import numpy as np

    from benchmarks.experiment import build_parts

    data: Any = build_parts(leyden_overrides(work, options)).data
    train = data.splits["train"]
    np.savez(path, image=train["image"][:, 0].numpy(), label=train["label"].numpy(), mean=data.mean[0], std=data.std[0])


def run_process(command: list[str], cwd: Path) -> float:
    """Runs a command on one thread in a terminal of its own, as a person would; returns the time it began.

    Raises:
        MeasurementError: with the end of its output.
    """
    paths = [str(SCRIPTS), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TERM": "xterm-256color",
        "COLUMNS": "120",
        "LINES": "40",
    }
    reader, writer = pty.openpty()
    start = time.time()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    os.close(writer)
    output = b""
    try:
        for chunk in _read(reader):
            output = (output + chunk)[-8000:]
    except BaseException:
        process.terminate()
        raise
    finally:
        os.close(reader)
        code = process.wait()
    if code:
        text = output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        raise MeasurementError(f"Exit status {code} of: {' '.join(command)}\n{text}")
    return start


def _read(reader: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # Linux says so when the last process has closed its side
            return
        if not chunk:
            return
        yield chunk


def measure(work: str, turn: Turn, options: Options, arrays: Path) -> dict[str, Any]:
    """Runs a turn in an empty folder; returns what it wrote: `epochs` and facts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        start = run_process(build_command(work, turn, options, out, arrays), Path(folder))
        if not out.is_file():
            raise MeasurementError(f"{turn.contender} ({turn.variant}) ended without a measurement.")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if "time_s" in found:  # a stamp: from the command to here
        return {"epochs": [{"cpu_s": found["cpu_s"], "wall_s": found["time_s"] - start}]}
    return found


def needs_arrays(turns: list[Turn]) -> bool:
    """Whether a contender takes part that does not know Leyden's data."""
    return any(turn.contender in ("keras1", "keras32", "lightning") for turn in turns)


def describe_turn(turn: Turn) -> str:
    """A turn's name for people."""
    return turn.contender if turn.variant in PLAIN else f"{turn.contender} ({turn.variant})"
