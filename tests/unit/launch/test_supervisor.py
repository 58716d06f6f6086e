"""Which process is named as the one that failed, and how a run was stopped."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from leyden.errors import ProcessError
from leyden.launch.job import Job
from leyden.launch.supervisor import (
    LOST,
    Failure,
    Member,
    _first_interruption,
    _raise_failure,
    environment_of,
)

JOB = Job({}, "", "/runs/1", [], {})
TERM = signal.SIGTERM


def members(*codes: int, asked: dict[int, list[signal.Signals]] | None = None) -> list[Member]:
    processes: list[Any] = [SimpleNamespace(pid=100 + r, poll=lambda code=code: code) for r, code in enumerate(codes)]
    return [Member(rank, process, (asked or {}).get(rank, [])) for rank, process in enumerate(processes)]


@pytest.mark.parametrize(
    ("codes", "received", "expected"),
    [
        ((0, 0), [], None),
        ((0, 0), [TERM], None),  # it was done before the signal
        ((143, 143), [TERM], TERM),
        ((143, 143), [], TERM),  # one of the processes got it
        ((130, 130), [signal.SIGINT], signal.SIGINT),
        ((143, LOST), [], TERM),
        ((143, 1), [], None),
        ((-9, 143), [], None),
        ((-9, -9), [signal.SIGINT, signal.SIGINT], signal.SIGINT),
        ((), [TERM], TERM),  # before the first was started
    ],
)
def test_signal_that_stopped_the_run(
    codes: tuple[int, ...], received: list[signal.Signals], expected: signal.Signals | None
) -> None:
    assert _first_interruption(members(*codes), received) == expected


@pytest.mark.parametrize(
    ("codes", "asked", "failures", "text", "is_reported"),
    [
        # killed from outside, whatever the others say of it
        ((1, -9), {}, {0: Failure(1.0, "RuntimeError: x")}, "Process 1 of 2 (pid 101) was killed by SIGKILL", False),
        ((-9, LOST), {}, {}, "Process 0 of 2 (pid 100) was killed by SIGKILL", False),
        # ended by the supervisor, after the other had failed
        ((-9, 1), {0: [TERM, signal.SIGKILL]}, {1: Failure(1.0, "ValueError: y")}, "Process 1 of 2", False),
        # the first to say so is the one
        (
            (1, 1),
            {},
            {0: Failure(2.0, "A: 0"), 1: Failure(1.0, "B: 1")},
            "Process 1 of 2 (pid 101) failed with B: 1",
            False,
        ),
        (
            (1, 1),
            {},
            {0: Failure(1.0, "A: 0"), 1: Failure(2.0, "B: 1")},
            "Process 0 of 2 (pid 100) failed with A: 0",
            True,
        ),
        # all say the same: the first has told it
        ((1, 1), {}, {0: Failure(2.0, "A: 0"), 1: Failure(1.0, "A: 0")}, "Process 1 of 2", True),
        ((LOST, 3), {}, {}, "Process 1 of 2 (pid 101) ended with exit code 3", False),
    ],
)
def test_process_that_failed_first(
    codes: tuple[int, ...], asked: Any, failures: dict[int, Failure], text: str, is_reported: bool
) -> None:
    with pytest.raises(ProcessError) as caught:
        _raise_failure(JOB, members(*codes, asked=asked), failures)
    assert text in str(caught.value)
    assert ("/runs/1/rank_1.log" in str(caught.value)) == ("Process 1" in text)
    assert caught.value.is_reported == is_reported


def test_nothing_is_raised_where_all_ended_well() -> None:
    _raise_failure(JOB, members(0, 0), {})


def test_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = environment_of(1, 3, 4567)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "1", "3", "4567")
    assert found["OMP_NUM_THREADS"] == "2"  # eight cores for three processes
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment_of(1, 3, 4567)["OMP_NUM_THREADS"] == "5"
