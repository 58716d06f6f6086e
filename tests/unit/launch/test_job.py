"""What the processes of a run are told, and where the others than the first write."""

from pathlib import Path

from leyden.launch.job import Job

LOGGING = {
    "version": 1,
    "formatters": {"plain": {"format": "%(message)s"}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "plain"},
        "file": {"class": "logging.FileHandler", "formatter": "plain", "filename": "/runs/é/train.log"},
        "order": {"class": "logging.FileHandler", "formatter": "plain", "filename": "/runs/é/order.log"},
    },
    "loggers": {"leyden.order": {"level": "INFO", "handlers": ["order"], "propagate": False}},
    "root": {"level": "INFO", "handlers": ["console", "file"]},
}
JOB = Job({"seed": 1, "name": 'ü "q"'}, "0123", "/runs/é", ["python", "train.py", "seed=1"], LOGGING)


def test_goes_through_json_unchanged() -> None:
    assert Job.loads(JOB.dumps()) == JOB


def test_first_process_logs_as_configured() -> None:
    assert JOB.logging_of(0) == LOGGING


def test_others_log_to_a_file_of_their_own_and_not_to_the_console() -> None:
    logging = JOB.logging_of(3)
    assert list(logging["handlers"]) == ["file"]
    assert Path(logging["handlers"]["file"]["filename"]) == Path("/runs/é/rank_3.log")
    assert logging["root"]["handlers"] == ["file"]
    assert logging["loggers"]["leyden.order"]["handlers"] == []
    assert LOGGING["handlers"]["file"]["filename"] == "/runs/é/train.log"  # type: ignore[index]
