"""Starts the processes of a run on this machine, waits for them, and ends all when one is lost.

The supervisor trains nothing and joins no process group, so that nothing of one run is left for the next one of a
sweep. It holds the store at which the processes find each other, on a port that the system gave it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from leyden.errors import Interrupted, ProcessError
from leyden.launch.job import Job, rank_log

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.1
# Until the others of a lost process have ended by themselves, and then by SIGTERM
GRACE_S = 3.0
# Until all have saved after a signal; a checkpoint may be large
SAVING_S = 120.0
# Exit status of a process that lost the connection to another: EX_TEMPFAIL of sysexits.h
LOST = 75
PARENT_PIPE = "LEYDEN_PARENT_PIPE"
FAILURES = "LEYDEN_FAILURES"


@dataclass
class Member:
    """One process of a run.

    Attributes:
        rank: its number.
        process: as started.
        asked: signals it was sent.
    """

    rank: int
    process: subprocess.Popen[bytes]
    asked: list[signal.Signals] = field(default_factory=list)

    def ask(self, number: signal.Signals) -> None:
        """Sends a signal, where it still runs."""
        if self.process.poll() is None:
            self.asked.append(number)
            self.process.send_signal(number)

    @property
    def exit_code(self) -> int | None:
        """Its exit status; minus the number of the signal that ended it; None while it runs."""
        return self.process.poll()


@dataclass(frozen=True)
class Failure:
    """What a process says of its end before it ends.

    Attributes:
        time: seconds since the epoch.
        message: type and text of the error.
    """

    time: float
    message: str


def write_failure(rank: int, err: BaseException) -> None:
    """Says in a process why it is going to end, for its supervisor."""
    folder = os.environ.get(FAILURES)
    if folder is not None:
        content = {"time": time.time(), "message": f"{type(err).__name__}: {err}"}
        (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(content), encoding="utf-8")


def run_processes(job: Job, count: int) -> None:
    """Runs a job in a number of processes until all have ended.

    A signal goes to all of them, once; a second SIGINT ends them at once. When one fails, the others are ended within
    seconds. When the supervisor itself is killed, they notice and end.

    Raises:
        ProcessError: when a process failed.
        Interrupted: when the run was told to stop, and has saved.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="leyden-job-")))
        members: list[Member] = []
        received = stack.enter_context(_forwarded(members))
        stack.callback(_end, members)
        _start(job, count, folder, members, received, stack)
        _wait(members)
        code = _first_interruption(members, received)
        if code is not None:
            raise Interrupted(code)
        _raise_failure(job, members, _read_failures(folder))


def _start(
    job: Job, count: int, folder: Path, members: list[Member], received: list[signal.Signals], stack: ExitStack
) -> None:
    from torch.distributed import TCPStore

    path = folder / "job.json"
    path.write_text(job.dumps(), encoding="utf-8")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: store)  # kept until all have ended
    reading, writing = os.pipe()  # its end is the end of this process
    stack.callback(os.close, writing)
    try:
        for rank in range(count):
            if received:
                return
            environment = (
                os.environ
                | environment_of(rank, count, store.port)
                | {
                    PARENT_PIPE: str(reading),
                    FAILURES: str(folder),
                }
            )
            command = [sys.executable, "-m", "leyden.worker", str(path)]
            options: dict[str, Any] = {}
            if rank:
                output = stack.enter_context(rank_log(Path(job.run_dir), rank).open("ab"))
                options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            # A session of their own: Ctrl-C reaches the supervisor alone, which passes it on once
            process = subprocess.Popen(command, env=environment, pass_fds=(reading,), start_new_session=True, **options)
            members.append(Member(rank, process))
    finally:
        os.close(reading)


def environment_of(rank: int, count: int, port: int) -> Mapping[str, str]:
    """The variables by which a process on this machine finds its place among the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there; the first process need not open it
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count))),
    }


@contextmanager
def _forwarded(members: list[Member]) -> Iterator[list[signal.Signals]]:
    """Passes signals on to the processes; gives the list of those received."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        hurry = received.count(signal.SIGINT) > 1
        if len(received) == 1 or hurry:
            for member in list(members):
                member.ask(signal.SIGKILL if hurry else signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(members: list[Member]) -> None:
    """Waits until all have ended; when one has failed, the others get no more than some seconds."""
    limit: float | None = None
    while any(member.exit_code is None for member in members):
        ended = [member.exit_code for member in members if member.exit_code is not None]
        failed = [code for code in ended if code != 0]
        if failed and limit is None:
            saving = all(_stopped_by(code) for code in failed)
            limit = time.monotonic() + (SAVING_S if saving else GRACE_S)
        if limit is not None and time.monotonic() > limit:
            _end(members)
        time.sleep(POLL_S)


def _end(members: list[Member]) -> None:
    """Ends those that still run: asks first, kills then."""
    for member in members:
        member.ask(signal.SIGTERM)
    limit = time.monotonic() + GRACE_S
    while any(member.exit_code is None for member in members) and time.monotonic() < limit:
        time.sleep(POLL_S)
    for member in members:
        member.ask(signal.SIGKILL)
        member.process.wait()


def _stopped_by(code: int | None) -> signal.Signals | None:
    """The signal that a process obeyed, as its exit status says it."""
    return next((number for number in SIGNALS if code == 128 + number), None)


def _first_interruption(members: list[Member], received: list[signal.Signals]) -> signal.Signals | None:
    """The signal that stopped the run, if it was one and no process was lost."""
    codes = [member.exit_code for member in members]
    stopped = [found for found in map(_stopped_by, codes) if found is not None]
    if received and (any(codes) or not members):
        return received[0]
    failed = [code for code in codes if code not in (0, LOST) and _stopped_by(code) is None]
    return stopped[0] if stopped and not failed else None


def _read_failures(folder: Path) -> dict[int, Failure]:
    found = {}
    for path in folder.glob("rank_*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[int(path.stem.removeprefix("rank_"))] = Failure(content["time"], content["message"])
    return found


def _raise_failure(job: Job, members: list[Member], failures: Mapping[int, Failure]) -> None:
    """Raises for the process that failed first: one that was killed, or the one that said so first."""
    bad = [member for member in members if member.exit_code]
    if not bad:
        return
    bad = [member for member in bad if member.exit_code != LOST] or bad
    killed = [m for m in bad if (m.exit_code or 0) < 0 and signal.Signals(-(m.exit_code or 0)) not in m.asked]
    told = sorted((m for m in bad if m.rank in failures), key=lambda m: failures[m.rank].time)
    culprit = (killed or told or bad)[0]
    shown = "" if culprit.rank == 0 else f" Its log: {rank_log(Path(job.run_dir), culprit.rank)}."
    if culprit in killed:
        name = signal.Signals(-(culprit.exit_code or 0)).name
        reason = f"was killed by {name}"
    elif culprit.rank in failures:
        reason = f"failed with {failures[culprit.rank].message}"
    else:
        reason = f"ended with exit code {culprit.exit_code}"
    text = f"Process {culprit.rank} of {len(members)} (pid {culprit.process.pid}) {reason}"
    first = failures.get(0)
    same = first is not None and culprit.rank in failures and first.message == failures[culprit.rank].message
    is_reported = culprit not in killed and first is not None and (culprit.rank == 0 or same)
    raise ProcessError(f"{text}.{shown} The others were ended with it.", is_reported)
