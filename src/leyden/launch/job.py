"""What the processes of a run are told: all of it, so that none composes a config of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One run, for all its processes.

    Attributes:
        config: the config, resolved.
        config_hash: of `config`; each process compares its own.
        run_dir: the run folder, absolute.
        command: the command line that started the run.
        logging: the configuration of Python's logging for the first process.
    """

    config: dict[str, Any]
    config_hash: str
    run_dir: str
    command: list[str]
    logging: dict[str, Any]

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def loads(cls, text: str) -> Job:
        """From `dumps`."""
        return cls(**json.loads(text))

    def logging_of(self, rank: int) -> dict[str, Any]:
        """The configuration of logging for one process: all but the first write to a file of their own, not to the
        console."""
        if rank == 0:
            return self.logging
        logging = json.loads(json.dumps(self.logging))
        kept = {name: handler for name, handler in logging["handlers"].items() if name == "file"}
        for handler in kept.values():
            handler["filename"] = str(rank_log(Path(self.run_dir), rank))
        logging["handlers"] = kept
        logging["root"]["handlers"] = list(kept)
        logging["loggers"] = {
            name: logger | {"handlers": [h for h in logger.get("handlers", []) if h in kept]}
            for name, logger in logging.get("loggers", {}).items()
        }
        return dict(logging)


def rank_log(run_dir: Path, rank: int) -> Path:
    """Where a process other than the first says what it does."""
    return run_dir / f"rank_{rank}.log"
