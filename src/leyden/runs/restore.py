"""A trained run brought back: its task and its data's preprocessing, from a run folder or a checkpoint alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from leyden.data.batch_transforms import Cutout, GaussianNoise, RandomAffine, RandomCrop, RandomFlip
from leyden.data.datamodule import DataModule
from leyden.data.filters import GaussianBlur, Sharpen, SobelEdges
from leyden.data.mixup import Mixup
from leyden.engine.checkpoint import read_checkpoint
from leyden.engine.ema import KEY
from leyden.engine.precision import run_in_precision
from leyden.engine.schedule import Schedule
from leyden.engine.task import Task
from leyden.errors import ConfigError, DataError
from leyden.hardware.layout import lay_out
from leyden.signatures import locate


@dataclass
class Checkpoint:
    """What a checkpoint of Leyden holds.

    Attributes:
        path: the file.
        config: the resolved config of the run.
        state_dict: the weights.
        data_state: what the datamodule fitted on its training split.
        metrics: as they were when it was saved.
        weights: "raw" for those of the last step, "ema" for an average over steps.
    """

    path: Path
    config: dict[str, Any]
    state_dict: dict[str, torch.Tensor]
    data_state: dict[str, Any]
    metrics: dict[str, float]
    weights: str = "raw"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a run folder (its best, else its last) or a path names.

    Raises:
        DataError: with the absolute path, and the checkpoints that are there.
    """
    if path.is_file():
        return path
    for candidate in (path / "checkpoints" / "best.ckpt", path / "checkpoints" / "last.ckpt"):
        if candidate.is_file():
            return candidate
    found = sorted(str(file) for file in path.rglob("*.ckpt")) if path.is_dir() else []
    listed = f" Checkpoints below it: {', '.join(found[:5])}." if found else ""
    raise DataError(f"There is no run folder or checkpoint at {path.absolute()}.{listed}")


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint without executing anything in it.

    Raises:
        DataError: when there is none, it is damaged, or Leyden did not write it.
    """
    path = find_checkpoint(path)
    content = read_checkpoint(path)
    data_state = next((v for v in content.values() if isinstance(v, dict) and {"facts", "fitted"} <= set(v)), {})
    return Checkpoint(
        path=path,
        config=content["leyden"]["config"],
        state_dict=content["state_dict"],
        data_state=data_state,
        metrics=content["leyden"]["metrics"],
        weights=content.get(KEY, {}).get("weights", "raw"),
    )


ALLOWED = (nn.Module, LightningDataModule, Schedule, torch.optim.Optimizer)
IMAGE_CHANGES = frozenset(
    {
        Cutout,
        GaussianBlur,
        GaussianNoise,
        Mixup,
        RandomAffine,
        RandomCrop,
        RandomFlip,
        Sharpen,
        SobelEdges,
    }
)


def check_targets(node: Any, key: str = "") -> None:
    """Refuses a config from a file that would call anything but the kinds of objects a model is made of.

    A checkpoint may come from a stranger. Its weights load as plain tensors, and its config may only name classes of
    networks, datamodules, schedules and optimisers, Leyden's changes of images, and torchvision's model builders.

    Raises:
        ConfigError: naming the key and the target.
    """
    if isinstance(node, list):
        for index, value in enumerate(node):
            check_targets(value, f"{key}[{index}]")
    if isinstance(node, str) and "${" in node:
        raise ConfigError(
            f"`{key}` of this checkpoint is '{node}', which could lead to anything; a config is saved without "
            "interpolations. Rebuild the run from its source instead."
        )
    if not isinstance(node, dict):
        return
    if "_target_" in node and not _is_allowed(locate(str(node["_target_"]))):
        raise ConfigError(
            f"`{key}._target_` of this checkpoint is '{node['_target_']}', which is neither a network, a datamodule, "
            "a schedule nor an optimiser, so it is not called. Rebuild the run from its source instead."
        )
    for name, value in node.items():
        check_targets(value, f"{key}.{name}" if key else str(name))


def _is_allowed(found: Any) -> bool:
    if inspect.isclass(found):
        return issubclass(found, ALLOWED) or found in IMAGE_CHANGES
    return inspect.isfunction(found) and str(found.__module__).startswith("torchvision.models.")


def restore(checkpoint: Checkpoint) -> tuple[Task, DataModule]:
    """Builds the task with its trained weights and the datamodule with its fitted preprocessing; reads no data.

    Raises:
        ConfigError: when the checkpoint names something that must not be called, or another kind of task.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from leyden.wiring import build_task

    sections = {key: checkpoint.config[key] for key in ("data", "model", "optim", "schedule")}
    for key, section in sections.items():
        check_targets(section, key)
    check_targets(checkpoint.data_state.get("facts", {}), "facts")  # these are written into the config
    cfg = OmegaConf.create(checkpoint.config)
    data = instantiate(cfg.data, _convert_="all")
    task = build_task(cfg, checkpoint.data_state.get("facts", {}))
    if not isinstance(task, Task) or not isinstance(data, DataModule):
        raise ConfigError(f"{checkpoint.path} holds a plain Lightning module; only Leyden's tasks are restored.")
    data.load_state_dict(checkpoint.data_state)
    run_in_precision(task.net, str(checkpoint.config["engine"]["precision"]))
    lay_out(task.net, checkpoint.config["hardware"]["channels_last"], "cpu")
    task.load_state_dict(checkpoint.state_dict)
    return task.eval(), data
