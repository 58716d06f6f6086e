"""The order of the processes, their commands, and what a failing one says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.processes import MeasurementError, Options, build_command, leyden_command, plan_turns, run_process


def test_contenders_take_turns() -> None:
    turns = plan_turns("cnn", Options(repeats=2, contenders=("raw", "leyden")))
    assert [(t.round, t.contender, t.variant) for t in turns] == [
        (number, *turn)
        for number in (0, 1)
        for turn in (("raw", "contiguous"), ("raw", "channels_last"), ("leyden", "plain"))
    ]


def test_leyden_runs_as_a_user_runs_it() -> None:
    command = leyden_command("mlp", Options(epochs=2), Path("out.json"))
    assert command[1].endswith("train.py")
    assert "experiment=vision_fashion_mnist_mlp" in command
    assert "trainer.max_epochs=3" in command  # one of warm-up
    switched_off = [word for word in command if word.endswith("=null") or "limit" in word]
    assert not switched_off


@pytest.mark.parametrize("work", ["mlp", "startup"])
def test_every_turn_has_a_command(work: str) -> None:
    options = Options(repeats=1, keras_python="other/python")
    for turn in plan_turns(work, options):
        command = build_command(work, turn, options, Path("out.json"), Path("arrays.npz"))
        assert any("out.json" in word for word in command)
        assert command[0] == ("other/python" if turn.contender.startswith("keras") else sys.executable)


def test_output_is_a_terminal_and_a_failure_shows_its_end(tmp_path: Path) -> None:
    run_process([sys.executable, "-c", "import sys; assert sys.stdout.isatty()"], tmp_path)
    with pytest.raises(MeasurementError, match=r"(?s)Exit status 3 of.*the reason"):
        run_process([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], tmp_path)


def test_one_thread_and_the_callbacks_at_hand(tmp_path: Path) -> None:
    code = "import os, benchmarks.clock; assert os.environ['OMP_NUM_THREADS'] == '1'"
    run_process([sys.executable, "-c", code], tmp_path)
