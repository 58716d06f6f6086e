"""Continuing a stopped run in its own folder, with its own config."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from leyden.config import flatten
from leyden.errors import ConfigError, DataError

log = logging.getLogger(__name__)

# What may differ from the run so far: it changes how long or where the run goes on, never what its steps compute.
FREE = ("trainer.max_epochs", "trainer.max_steps", "hardware", "logger", "callbacks", "paths", "resume", "resume_force",
        "test", "sweep", "debug", "trainer.num_sanity_val_steps", "trainer.limit_test_batches")  # fmt: skip


@dataclass(frozen=True)
class Stopped:
    """A run that can go on.

    Attributes:
        folder: its run folder.
        checkpoint: its newest whole state; None where it stopped before one was saved, and starts from its beginning.
        damaged: newer states that are damaged.
        epochs: epochs it has completed.
        steps: optimiser steps it has taken.
        config: its resolved config at that state.
        metrics: their values at that state.
        finished: whether it came to its end.
        data: the fingerprint of its data.
        num_threads: CPU threads that its operators took.
        content: of the checkpoint, until it is taken.
    """

    folder: Path
    checkpoint: Path | None = None
    damaged: list[Path] = field(default_factory=list)
    epochs: int = 0
    steps: int = 0
    config: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    data: dict[str, Any] | None = None
    num_threads: int | None = None
    content: dict[str, Any] = field(default_factory=dict, repr=False)


def find_run(name: str, outputs: Path) -> Path:
    """The run folder that `resume` names: a path, or "last" for the newest run below `outputs`.

    Raises:
        ConfigError: when there is none.
    """
    if name == "last":
        records = sorted(outputs.rglob("run.json"), key=lambda path: path.stat().st_mtime)
        if not records:
            raise ConfigError(f"`resume` is last, but there is no run below {outputs.absolute()}.")
        return records[-1].parent
    folder = Path(name)
    if not (folder / ".hydra" / "overrides.yaml").is_file():
        found = sorted(str(path.parent.parent) for path in outputs.rglob(".hydra/overrides.yaml"))[-5:]
        listed = f" Runs below {outputs}: {', '.join(found)}." if found else ""
        raise ConfigError(f"`resume` names {folder.absolute()}, which is not a run folder.{listed}")
    return folder


def past_overrides(folder: Path) -> list[str]:
    """The command line's overrides of a run."""
    content = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    return [str(override) for override in content or []]


def load_stopped(folder: Path) -> Stopped:
    """Reads where a run stands: its newest state that is whole.

    Raises:
        DataError: when all its states are damaged.
    """
    from leyden.engine.checkpoint import read_checkpoint

    paths = find_states(folder)
    if not paths:  # it stopped before its first state was saved
        return Stopped(folder)
    problems: list[DataError] = []
    for path in paths:
        try:
            content = read_checkpoint(path)
        except DataError as err:
            problems.append(err)
            continue
        for problem in problems:
            log.warning("%s Going on from %s, the one before.", problem, path)
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return Stopped(
            folder=folder,
            checkpoint=path,
            damaged=paths[: len(problems)],
            epochs=content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
            steps=content["global_step"],
            config=content["leyden"]["config"],
            metrics=content["leyden"]["metrics"],
            finished=record["state"] == "finished",
            data=record.get("data"),
            num_threads=content["leyden"]["num_threads"],
            content=content,
        )
    raise DataError(" ".join(map(str, problems)))


def find_states(folder: Path) -> list[Path]:
    """The last states of a run, newest first: last.ckpt, last-1.ckpt, ..."""
    numbered = {int(path.stem.removeprefix("last-")): path for path in (folder / "checkpoints").glob("last-*.ckpt")}
    newest = folder / "checkpoints" / "last.ckpt"
    return [*([newest] if newest.is_file() else []), *(numbered[age] for age in sorted(numbered))]


def set_aside(stopped: Stopped) -> None:
    """Renames damaged states, so that they do not push the whole one out of its place."""
    for path in stopped.damaged:
        path.replace(path.with_name(f"{path.name}.damaged"))


def check_resumable(stopped: Stopped, config: Mapping[str, Any], data: dict[str, Any] | None, force: bool) -> None:
    """Checks that a run has something left to do, on the same data and with the same settings.

    Args:
        stopped: where it stands.
        config: the resolved config it would go on with.
        data: the fingerprint of the data it would go on with.
        force: whether other settings and data are asked for.

    Raises:
        ConfigError: naming what differs, or what to raise.
    """
    epochs, steps = config["trainer"]["max_epochs"], config["trainer"]["max_steps"]
    if stopped.finished and (stopped.epochs >= epochs or 0 < steps <= stopped.steps):
        raise ConfigError(
            f"{stopped.folder} is finished: it is at epoch {stopped.epochs} of {epochs} (step {stopped.steps}). "
            "Raise trainer.max_epochs to go on."
        )
    if force or stopped.config is None:
        return
    check_same_maths(stopped.config, config)
    if stopped.data is not None and data != stopped.data:
        parts = ", ".join(sorted(key for key in stopped.data if (data or {}).get(key) != stopped.data[key]))
        raise ConfigError(
            f"`resume`: the data of {stopped.folder} has changed since it started ({parts}). "
            "Bring it back, or say resume_force=true to go on with the new data."
        )


def check_same_maths(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the config of a run with the one it would go on with.

    Raises:
        ConfigError: naming each key that would change what the steps compute.
    """
    old, new = flatten(before), flatten(now)
    changed = [
        f"{key} ({old.get(key, 'absent')} -> {new.get(key, 'absent')})"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    if changed:
        raise ConfigError(
            f"`resume` would go on with other settings than before: {'; '.join(changed)}. "
            "Leave them as they were, or say resume_force=true to change them in the middle of the run."
        )


def resume_arguments(arguments: list[str]) -> list[str]:
    """A command line with `resume=RUN` as the run's own command line, in its own folder.

    What else the command line says comes after the run's overrides; `check_resumable` judges it.

    Raises:
        ConfigError: when there is no such run, or a sweep was asked for.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    name = given.get("resume", "").strip("'\"")
    if name in ("", "null"):
        return arguments
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("`resume` continues one run; it cannot be combined with a sweep (-m).")
    outputs = Path(given.get("paths.outputs", "outputs").strip("'\""))
    folder = find_run(name, outputs).absolute()
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    others = [argument for argument in arguments if not argument.startswith("resume=")]
    return [
        *past_overrides(folder),
        *others,
        f'resume="{quoted}"',
        f'hydra.run.dir="{quoted}"',
        "hydra.output_subdir=null",  # the folder keeps the config it started with
    ]


def resume_command(folder: Path) -> str:
    """The command line that goes on with a run."""
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"python train.py {shlex.quote(f'resume={shown}')}"
