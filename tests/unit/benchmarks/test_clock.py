"""The clock of epochs, on a time that the test sets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import clock
from benchmarks.clock import EpochClock, cpu_seconds


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time to come: CPU seconds at each look at the clock, wall seconds ten times that."""
    times: list[float] = []
    monkeypatch.setattr(clock, "now", lambda: (times[0], 10 * times.pop(0)))
    return times


def test_an_epoch_ends_where_the_next_starts_and_validation_is_apart(ticks: list[float], tmp_path: Path) -> None:
    timer = EpochClock(warmup_epochs=1)
    ticks += [0.0]  # start of the warm-up
    timer.start_epoch()
    ticks += [5.0, 5.0]  # its end; start of the first that counts
    timer.start_epoch()
    ticks += [6.0, 8.0]  # validation
    timer.pause()
    timer.resume()
    ticks += [9.0, 9.0]
    timer.start_epoch()
    ticks += [9.5]
    timer.finish()
    # 9 - 5 - 2 and 9.5 - 9
    assert [epoch["cpu_s"] for epoch in timer.epochs] == [2.0, 0.5]
    assert [epoch["wall_s"] for epoch in timer.epochs] == [20.0, 5.0]
    assert [epoch["validation_cpu_s"] for epoch in timer.epochs] == [2.0, 0.0]
    timer.write(str(tmp_path / "out.json"), num_batches=3)
    assert json.loads((tmp_path / "out.json").read_text())["num_batches"] == 3


def test_profile_holds_only_what_counts(tmp_path: Path) -> None:
    import pstats

    def warm_up() -> None: ...
    def train() -> None: ...
    def validate() -> None: ...

    timer = EpochClock(1, str(tmp_path / "out.prof"))
    timer.start_epoch()
    warm_up()
    timer.start_epoch()
    train()
    timer.pause()
    validate()
    timer.resume()
    timer.finish()
    stats = pstats.Stats(str(tmp_path / "out.prof")).stats  # type: ignore[attr-defined]
    names = {name for _, _, name in stats}
    assert "train" in names
    assert not names & {"warm_up", "validate"}


def test_time_of_ended_children_counts() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True)
    assert cpu_seconds() - before >= 0.2


def test_time_of_running_workers_counts() -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    before = cpu_seconds()
    worker = context.Process(target=_work, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(60)
    try:
        assert worker.is_alive()
        assert cpu_seconds() - before >= 0.2
    finally:
        worker.terminate()
        worker.join()


def _work(ready: object) -> None:
    import time

    while time.process_time() < 0.3:
        pass
    ready.set()  # type: ignore[attr-defined]
    time.sleep(60)
