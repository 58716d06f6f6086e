"""What counts as a difference between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from leyden.engine.checkpoint import write_checkpoint
from leyden.runs import prove_resume
from leyden.runs.prove_resume import Proof, difference

ONE = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"a": [ONE, 1]}, 0.0),
        ({"a": [ONE + torch.tensor([[0, 0], [0, 0.25]]), 1]}, 0.25),
        ({"a": [ONE, 1.5]}, 0.5),
        ({"a": [ONE]}, float("inf")),
        ({"b": [ONE, 1]}, float("inf")),
        ({"a": [ONE.double(), 1]}, float("inf")),
        ({"a": [ONE[0], 1]}, float("inf")),
        ({"a": [ONE, "word"]}, float("inf")),
        (None, float("inf")),
    ],
)
def test_largest_difference_of_nested_states(second: Any, expected: float) -> None:
    assert difference({"a": [ONE, 1]}, second) == expected


def test_nan_is_a_difference_only_from_other_values() -> None:
    nan = torch.tensor([float("nan")])
    assert difference(nan, torch.zeros(1)) != 0


def write_run(
    folder: Path, weight: float = 1.0, rows: list[dict[str, Any]] | None = None, history: str = "a\n1\n"
) -> Path:
    state = {"state_dict": {"w": torch.tensor([weight])}, "leyden": {}, "optimizer_states": []}
    write_checkpoint(state, folder / "checkpoints" / "last.ckpt")
    rows = ROWS if rows is None else rows
    (folder / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (folder / "history.csv").write_text(history, encoding="utf-8")
    (folder / "metrics.json").write_text("{}", encoding="utf-8")
    return folder


ROWS = [{"step": step, "epoch": 0, "loss": ["0x1"], "samples": [2 * step, 2 * step + 1]} for step in range(3)]


def compare(tmp_path: Path, **changes: Any) -> Proof:
    proof = Proof(3, kills=[2], resumed_from=[1], num_samples=6)
    prove_resume._compare(proof, write_run(tmp_path / "straight"), write_run(tmp_path / "killed", **changes))
    return proof


def test_equal_runs_are_exact(tmp_path: Path) -> None:
    proof = compare(tmp_path)
    assert proof.is_exact
    assert proof == Proof(3, kills=[2], resumed_from=[1], num_samples=6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weight": 1.5}, {"weight_difference": 0.5}),
        ({"rows": [*ROWS[:2], {**ROWS[2], "loss": ["0x2"]}]}, {"differing_steps": [2]}),
        ({"rows": ROWS[:2]}, {"differing_steps": [2], "miscounted": 2}),
        ({"rows": [*ROWS[:2], {**ROWS[2], "samples": [4, 4]}]}, {"differing_steps": [2], "miscounted": 2}),
        ({"history": "a\n1\n1\n"}, {"differing_files": ["history.csv"]}),
    ],
    ids=["weights", "loss", "step missing", "sample twice", "history"],
)
def test_each_difference_is_named(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    proof = compare(tmp_path, **changes)
    assert not proof.is_exact
    assert proof == Proof(3, kills=[2], resumed_from=[1], num_samples=6, **expected)
    with (console := Console(width=100)).capture() as capture:
        console.print(proof.table())
    assert "NO" in capture.get()
    assert "2 -> 1" in capture.get()
