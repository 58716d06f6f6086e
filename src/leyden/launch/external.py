"""Processes that torchrun or srun started: the first composes the config and makes the run folder, all take it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from leyden.errors import ConfigError
from leyden.launch.job import Job
from leyden.launch.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "leyden/job"
# Until the first process has composed the config; it may have to check much, but has not read data
WAIT = timedelta(minutes=10)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_opened: list[Store] = []


def open_store(place: Place) -> Store:
    """The store at which the processes meet: torchrun's own, or one that the first process opens."""
    from torch.distributed import PrefixStore, TCPStore

    if not _opened:
        opens = place.rank == 0 and os.environ.get(AGENT_STORE) != "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _opened.append(TCPStore(address, port, is_master=opens, wait_for_workers=False, timeout=WAIT))
        os.environ[AGENT_STORE] = "True"  # for the process group, which comes later
    return PrefixStore(f"leyden/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _opened[0])


def publish(place: Place, job: Job) -> None:
    """Gives the other processes their job."""
    open_store(place).set(KEY, job.dumps())


def publish_end(place: Place) -> None:
    """Lets the other processes go where there is no job: for --help, or a wrong config."""
    store = open_store(place)
    if not store.check([KEY]):
        store.set(KEY, "")


def receive(place: Place, arguments: list[str]) -> Job | None:
    """Waits for the job in a process that is not the first; None where there is none.

    Args:
        place: of this process.
        arguments: its own command line, without the program.

    Raises:
        ConfigError: where it was started with other arguments than the first.
    """
    text = open_store(place).get(KEY).decode()
    if not text:
        return None
    job = Job.loads(text)
    theirs = job.command[2:]  # after the interpreter and the program
    if arguments != theirs:
        mine = [argument for argument in arguments if argument not in theirs]
        missing = [argument for argument in theirs if argument not in arguments]
        raise ConfigError(
            f"Process {place.rank} of {place.world_size} was started with other arguments than the first one: "
            f"{' '.join(mine) or 'without any'} in place of {' '.join(missing) or 'none'}. Give all the same."
        )
    return job
