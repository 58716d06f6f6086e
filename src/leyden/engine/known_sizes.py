"""Micro-batch sizes that earlier runs found to fit, one small file for each network, data and device."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leyden.data.datamodule import DataModule

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

# Settings of the engine that change how much memory a step takes, or make it run out
SETTINGS = ("precision", "accumulate_batches", "compile", "activation_checkpointing", "ema_decay",
            "inject_out_of_memory_above")  # fmt: skip


def path_of(task: Task, data: DataModule, folder: Path) -> Path:
    """Where the size for a task on its device and data is kept."""
    facts = {
        "task": type(task).__qualname__,
        "weights": {name: list(weight.shape) for name, weight in task.net.named_parameters()},
        "optim": str(getattr(task.optim, "func", task.optim)),
        "samples": {name: [list(rows.shape[1:]), str(rows.dtype)] for name, rows in data.first_rows(1).items()},
        "batch_size": data.batch_size,
        "num_devices": task.trainer.world_size,
        "device": describe_device(task.device),
        "torch": torch.__version__,
        **{name: getattr(task.engine, name) for name in SETTINGS},
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{key}.json"


def describe_device(device: torch.device) -> str:
    """The card's name and memory; of other devices their kind."""
    if device.type != "cuda":
        return device.type
    card = torch.cuda.get_device_properties(device)
    return f"{card.name}, {card.total_memory} bytes"


def read_size(path: Path) -> int | None:
    """The size in a file; None where there is none, or none that can be read (it is found again)."""
    try:
        size = json.loads(path.read_text(encoding="utf-8"))["micro_batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) and size >= 1 else None


def write_size(path: Path, size: int) -> None:
    """Writes a size, whole or not at all. What cannot be written is found again, so it is only said."""
    content: dict[str, Any] = {"micro_batch_size": size}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as err:
        log.warning("The micro-batch size that fits is not kept for the next run: %s: %s.", path, err.strerror)
