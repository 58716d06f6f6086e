"""trace.jsonl: one row a step, whole rows only, and none twice after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from leyden.callbacks.trace import read_trace

TRACE = "+callbacks.trace._target_=leyden.callbacks.trace.Trace"
SHORT = ("experiment=regression", "data=diabetes", "logger=null", "hardware.num_threads=1", "test=false")


def test_row_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert read_trace(path) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste', encoding="utf-8")
    assert read_trace(path) == [{"step": 0}, {"step": 1}]


def test_one_row_a_step_however_many_a_call_takes(train: Callable) -> None:
    traces = []
    for steps in (1, 5):
        many = (f"engine.steps_per_execution={steps}", "engine.accumulate_batches=2", "trainer.max_epochs=2")
        result = train(*SHORT, TRACE, *many, "data.batch_size=64")
        assert result.exit_code == 0, result.output
        traces.append(read_trace(result.folder / "trace.jsonl"))
    one, five = traces
    assert one == five
    assert [row["step"] for row in one] == list(range(len(one)))
    assert {len(row["loss"]) for row in one} == {1, 2}  # the last step of an epoch may have one batch only
    num_samples = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))["data"]["train"]["num_samples"]
    for epoch in (0, 1):
        seen = sorted(sample for row in one if row["epoch"] == epoch for sample in row["samples"])
        assert seen == list(range(num_samples))


def test_task_of_another_framework_is_refused(train: Callable) -> None:
    task = ("model._target_=lightning.pytorch.demos.boring_classes.BoringModel", "~model.net")
    result = train("experiment=regression", TRACE, *task)
    assert result.exit_code == 1
    assert "`callbacks.trace` needs a task of Leyden" in result.output
