"""The proof that each sample is taken once an epoch, in one order, wherever the data stays and whoever shares it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

import torch
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from leyden.config import validate
from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch, BatchLoader
from leyden.data.order import order_hash
from leyden.data.workers import shut_down
from leyden.errors import ConfigError
from leyden.wiring import build_data, drop_replaced_keys

Kind = Literal["device", "host", "mmap", "workers"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Epoch:
    """One way of reading an epoch.

    Attributes:
        residency: where the data stayed.
        ranks: processes that shared each batch.
        number: of the epoch.
        num_samples: of the training split, less those of a last batch that is left out.
        missing: samples that no rank took.
        repeated: samples that were taken more than once.
        order: hash of the samples in the order of the global batches.
        content: hash of the batches' values.
    """

    residency: str
    ranks: int
    number: int
    num_samples: int
    missing: int = 0
    repeated: int = 0
    order: str = ""
    content: str = ""


@dataclass
class OrderProof:
    """All ways that were compared."""

    epochs: list[Epoch] = field(default_factory=list)

    def is_exact(self, epoch: Epoch) -> bool:
        """Whether a way counts each sample once, in the order and with the values of the first way."""
        first = next(other for other in self.epochs if other.number == epoch.number)
        same = (epoch.order, epoch.content) == (first.order, first.content)
        return same and not epoch.missing and not epoch.repeated

    @property
    def all_exact(self) -> bool:
        """Whether all ways are exact, and each epoch has an order of its own."""
        orders = {epoch.order for epoch in self.epochs}
        numbers = {epoch.number for epoch in self.epochs}
        return bool(self.epochs) and all(map(self.is_exact, self.epochs)) and len(orders) == len(numbers)

    def table(self) -> Table:
        """The proof for people."""
        table = Table(title="Order of the training samples", title_justify="left", box=box.SIMPLE)
        for name in ("epoch", "data in", "ranks", "samples", "lost/twice", "order", "values", "exact"):
            is_number = name in ("ranks", "samples", "lost/twice")
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        for epoch in self.epochs:
            table.add_row(
                str(epoch.number),
                epoch.residency,
                str(epoch.ranks),
                f"{epoch.num_samples:,}",
                f"{epoch.missing}/{epoch.repeated}",
                epoch.order[:8],
                epoch.content[:8],
                "[green]yes[/]" if self.is_exact(epoch) else "[red]NO[/]",
            )
        return table


def parse_ranks(text: str, option: str = "--ranks") -> list[int]:
    """Numbers of processes, such as "1,2,3".

    Raises:
        ConfigError: for anything but whole numbers from 1 on.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} is {text}; give whole numbers from 1 on, e.g. 1,2,3.")
    return [int(part) for part in parts]


def parse_kinds(text: str | None) -> list[Kind] | None:
    """Places, such as "host,mmap"; None is all that the data can stay in.

    Raises:
        ConfigError: for a word that is none of them.
    """
    if text is None:
        return None
    kinds = [kind for part in text.split(",") for kind in KINDS if kind == part.strip()]
    if len(kinds) != len(text.split(",")):
        raise ConfigError(f"--residencies is {text}; choose from {', '.join(KINDS)}.")
    return kinds


def load_data(cfg: DictConfig, overrides: list[str]) -> DataModule:
    """Checks a config and reads its data.

    Raises:
        ConfigError: for problems of the config, or a datamodule that is not Leyden's.
    """
    drop_replaced_keys(cfg, overrides)
    validate(cfg)
    data = build_data(cfg)
    if not isinstance(data, DataModule):
        raise ConfigError(f"{type(data).__name__} is no datamodule of Leyden, so its order is its own.")
    return data


def prove_order(
    data: DataModule, ranks: Sequence[int] = (1, 2, 3), residencies: Sequence[Kind] | None = None, epochs: int = 2
) -> OrderProof:
    """Reads epochs of a datamodule in all ways and compares them.

    Args:
        data: set up.
        ranks: numbers of processes; each rank's part is read in this process.
        residencies: where the data stays; None is everywhere it can.
        epochs: how many, from 0 on.

    Raises:
        ConfigError: when the data has no order of its own, or cannot stay somewhere.
    """
    proof = OrderProof()
    if data.num_samples("train") == 0:
        raise ConfigError(f"{data.describe()} has no training samples.")
    kinds = residencies or (KINDS if data.splits else ("workers",))
    ways = list(product(kinds, range(epochs), ranks))
    for residency, number, world_size in track(ways, "reading", console=Console(stderr=True), transient=True):
        data.use_residency(residency)
        loaders = [_loader(data, rank, world_size) for rank in range(world_size)]
        proof.epochs.append(_read(loaders, residency, number))
        shut_down()
    return proof


def _loader(data: DataModule, rank: int, world_size: int) -> BatchLoader:
    data.with_index = True
    loader = data.make_loader("train", shuffle=True, grouped=False, rank=rank, world_size=world_size)
    if not isinstance(loader, BatchLoader) or not loader.shuffle:
        raise ConfigError(f"{data.describe()} is a stream: its order is its own, so there is nothing to prove.")
    return loader


def _read(loaders: Sequence[BatchLoader], residency: str, number: int) -> Epoch:
    for loader in loaders:
        loader.set_epoch(number)
    first, taken, content = loaders[0], [], hashlib.blake2b(digest_size=8)
    counts = torch.zeros(first.num_samples, dtype=torch.int64)
    for parts in zip(*(loader.batches() for loader in loaders), strict=True):
        batch = {name: torch.cat([_widen(part, parts, name) for part in parts]) for name in parts[0]}
        taken.append(batch.pop("index"))
        counts += torch.bincount(taken[-1], minlength=len(counts))
        for name, tensor in sorted(batch.items()):
            content.update(name.encode())
            content.update(tensor.contiguous().numpy().tobytes())
    return Epoch(
        residency=residency,
        ranks=len(loaders),
        number=number,
        num_samples=first.num_samples - first.num_dropped,
        missing=int((counts == 0).sum()) - first.num_dropped,
        repeated=int((counts > 1).sum()),
        order=order_hash(torch.cat(taken).int()),
        content=content.hexdigest(),
    )


def _widen(part: Batch, parts: Sequence[Batch], name: str) -> Tensor:
    """A rank's tensor, as wide as the widest: each rank cuts padding by its own rows."""
    tensor = part[name]
    missing = max(other[name].shape[1] for other in parts) - tensor.shape[1] if tensor.ndim == 2 else 0
    return functional.pad(tensor, (0, missing)) if missing else tensor
