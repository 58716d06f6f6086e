"""The parts of an experiment without its framework: for contenders that train the same network in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from leyden.config import conf_dir
from leyden.data.datamodule import DataModule
from leyden.data.image_changes import BatchChange
from leyden.engine.classification import ClassificationTask
from leyden.engine.optim import build_optimizer
from leyden.nlp.data import TextData
from leyden.vision.data import ImageData
from leyden.wiring import build_data, build_task, drop_replaced_keys


@dataclass
class Parts:
    """What a loop by hand needs.

    Attributes:
        data: the datamodule, with its splits in memory.
        net: the network.
        optimizer: over its parameters.
        label_smoothing: of the cross-entropy.
        rate: learning rate of (step, total steps).
        cut: makes the batch of given rows (B,): network input, labels (B,).
    """

    data: DataModule
    net: nn.Module
    optimizer: torch.optim.Optimizer
    label_smoothing: float
    rate: Callable[[int, int], float]
    cut: Callable[[Tensor], tuple[Tensor, Tensor]]


def build_parts(overrides: Sequence[str]) -> Parts:
    """Builds an experiment's data, network and optimiser from its overrides."""
    import leyden.entry  # noqa: F401  registers the resolvers that the config uses

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("train", list(overrides))
    drop_replaced_keys(cfg, overrides)
    torch.manual_seed(cfg.seed)
    data = build_data(cfg)
    assert isinstance(data, ImageData | TextData)
    task = build_task(cfg, data.facts)
    assert isinstance(task, ClassificationTask)
    optimizer, schedule = build_optimizer(task.optim, task.net), task.schedule
    lr = float(cfg.optim.lr)
    return Parts(
        data,
        task.net,
        optimizer,
        task.label_smoothing,
        lambda step, total: lr * schedule.factor(step, total),
        image_cutter(data) if isinstance(data, ImageData) else text_cutter(data),
    )


def image_cutter(data: ImageData) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Cuts uint8 images, converts, augments and normalises them; constants are made once."""
    images, labels = data.splits["train"]["image"], data.splits["train"]["label"]
    mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (data.mean, data.std))
    generator = torch.Generator().manual_seed(0)
    changes = [change for change in data.augment if not isinstance(change, BatchChange)]  # no work mixes labels
    scale, shift = 1 / (255 * std), -mean / std

    def cut(rows: Tensor) -> tuple[Tensor, Tensor]:
        # Copies whole rows, where images[rows] would copy byte by byte.
        image, label = images.index_select(0, rows).float(), labels.index_select(0, rows)
        if not changes:
            return image.mul_(scale).add_(shift), label
        image.div_(255)
        for change in changes:
            image = change(image, generator)
        return image.sub_(mean).div_(std), label

    return cut


def text_cutter(data: TextData) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Cuts texts to the longest of the batch; their lengths are counted once."""
    tokens, labels = data.splits["train"]["tokens"], data.splits["train"]["label"]
    lengths = (tokens != 0).sum(dim=1)

    def cut(rows: Tensor) -> tuple[Tensor, Tensor]:
        length = int(lengths.index_select(0, rows).max())
        return tokens.index_select(0, rows)[:, :length].long(), labels.index_select(0, rows)

    return cut
