"""One process of a run that takes several: `python -m leyden.worker JOB_FILE`, started by Leyden itself."""

from __future__ import annotations

import atexit
import logging
import logging.config
import os
import sys
import threading
from pathlib import Path
from typing import Any

from leyden.errors import USER_ERRORS, ConfigError, Interrupted
from leyden.launch.job import Job
from leyden.launch.supervisor import LOST, PARENT_PIPE, write_failure

log = logging.getLogger("leyden")


def main() -> None:
    """Runs the job of a file, as one of the processes that the environment tells of."""
    watch_parent()
    code: int | str | None = 0
    try:
        work(Job.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except SystemExit as end:
        code = end.code
    leave(code if isinstance(code, int) else 1)


def leave(code: int) -> None:
    """Ends this process after all that has to be done at its end.

    Not by the interpreter's own way: while that takes itself apart, a thread of gloo's that still wants it ends the
    process by SIGABRT now and then (torch 2.14, Python 3.11), and a run that went well would look lost.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def watch_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended and whatever this one waits for."""
    end_of_pipe = os.environ.pop(PARENT_PIPE, None)
    if end_of_pipe is None:
        return
    pipe = int(end_of_pipe)

    def wait() -> None:
        os.read(pipe, 1)  # nothing is ever written to it
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def work(job: Job) -> Any:
    """Runs a job in this process and ends the process where it fails.

    Returns:
        the objective.
    """
    import torch.distributed as dist
    from omegaconf import OmegaConf

    from leyden.runner import run_here
    from leyden.runs.folder import hash_config

    rank = int(os.environ["RANK"])
    sys.argv = job.command[1:]  # what the record of the run shows
    logging.config.dictConfig(job.logging_of(rank))
    try:
        found = hash_config(job.config)
        if found != job.config_hash:
            raise ConfigError(f"Process {rank} has another config ({found}) than the first ({job.config_hash}).")
        log.log(logging.DEBUG if rank == 0 else logging.INFO, "Process %d, config hash %s", rank, found)
        objective = run_here(OmegaConf.create(job.config), Path(job.run_dir))
        dist.destroy_process_group()
        return objective
    except Interrupted as err:
        raise SystemExit(err.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except USER_ERRORS as err:
        write_failure(rank, err)
        log.error("%s: %s", type(err).__name__, err)
        raise SystemExit(1) from err
    except Exception as err:
        if lost_connection(err):
            log.error("The connection to another process was lost: %s", str(err).splitlines()[0])
            raise SystemExit(LOST) from None
        write_failure(rank, err)
        log.exception("Process %d failed.", rank)
        raise SystemExit(1) from None


def lost_connection(err: Exception) -> bool:
    """Whether an error is no more than the end of another process, as gloo and NCCL tell it."""
    text = str(err).lower()
    return isinstance(err, RuntimeError) and ("gloo" in text or "nccl" in text) and "connect" in text


if __name__ == "__main__":
    main()
