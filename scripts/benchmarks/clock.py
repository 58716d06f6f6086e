"""CPU and wall time of epochs. Only the standard library, since contenders may have an environment of their own."""

from __future__ import annotations

import cProfile
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any


def cpu_seconds() -> float:
    """CPU time of this process and its children so far, user and system, in seconds.

    The kernel adds a child's time to RUSAGE_CHILDREN when the child has ended; that of workers which still run is
    read from /proc (Linux).
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    workers = multiprocessing.active_children()
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(_live_seconds(w.pid) for w in workers)


def _live_seconds(pid: int | None) -> float:
    # After the command, which is in brackets and may hold blanks, utime and stime are fields 12 and 13.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def now() -> tuple[float, float]:
    """CPU and wall time, in seconds."""
    return cpu_seconds(), time.perf_counter()


class EpochClock:
    """Measures epochs that follow one another: an epoch ends where the next one starts.

    What happens between `pause` and `resume` (validation) is counted apart.

    Args:
        warmup_epochs: epochs at the start that do not count.
        profile: file for a cProfile of the epochs that count, without their pauses; None for no profile.
    """

    def __init__(self, warmup_epochs: int, profile: str | None = None) -> None:
        self.warmup_epochs = warmup_epochs
        self.epochs: list[dict[str, float]] = []
        self._started: tuple[float, float] | None = None
        self._paused: tuple[float, float] | None = None
        self._apart = (0.0, 0.0)
        self._num_started = 0
        self._profile_path = profile
        self._profiler = cProfile.Profile() if profile else None

    def start_epoch(self) -> None:
        """Ends the epoch before, if there is one, and starts the next."""
        self._end_epoch()
        self._num_started += 1
        self._apart = (0.0, 0.0)
        self._profile(True)
        self._started = now()

    def pause(self) -> None:
        """Starts what does not belong to training."""
        self._profile(False)
        self._paused = now()

    def resume(self) -> None:
        """Ends what does not belong to training."""
        assert self._paused is not None
        cpu, wall = now()
        self._apart = (self._apart[0] + cpu - self._paused[0], self._apart[1] + wall - self._paused[1])
        self._profile(True)

    def finish(self) -> None:
        """Ends the last epoch and writes the profile."""
        self._end_epoch()
        if self._profiler is not None:
            self._profiler.dump_stats(str(self._profile_path))

    def _end_epoch(self) -> None:
        if self._started is None:
            return
        cpu, wall = now()
        self._profile(False)
        if self._num_started > self.warmup_epochs:
            self.epochs.append(
                {
                    "cpu_s": cpu - self._started[0] - self._apart[0],
                    "wall_s": wall - self._started[1] - self._apart[1],
                    "validation_cpu_s": self._apart[0],
                    "validation_wall_s": self._apart[1],
                }
            )
        self._started = None

    def _profile(self, on: bool) -> None:
        if self._profiler is None or self._num_started <= self.warmup_epochs:
            return
        if on:
            self._profiler.enable()
        else:
            self._profiler.disable()

    def write(self, path: str, **facts: Any) -> None:
        """Writes the measured epochs and further facts as JSON."""
        Path(path).write_text(json.dumps({"epochs": self.epochs, **facts}), encoding="utf-8")


def write_stamp(path: str) -> None:
    """Writes the CPU time of this process so far and the time of day, both in seconds."""
    Path(path).write_text(json.dumps({"cpu_s": cpu_seconds(), "time_s": time.time()}), encoding="utf-8")
