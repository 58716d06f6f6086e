"""The base datamodule: splits as tensors, facts for the network, a fingerprint, fitted preprocessing."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import torch
from annotated_types import Ge
from lightning.pytorch import LightningDataModule
from torch import Tensor

import leyden
from leyden.data.cache import build_once, content_key
from leyden.data.loaders import Batch, Batches, BatchLoader, TensorLoader
from leyden.data.order import derive_seed
from leyden.data.ranks import data_rank, data_size
from leyden.data.residency import (
    Kind,
    Residency,
    Room,
    choose_residency,
    free_memory,
    free_on,
    map_arrays,
    move_to_disk,
    num_bytes,
    place,
    save_arrays,
)
from leyden.data.workers import Rows, Samples, WorkerLoader, default_num_workers
from leyden.errors import ConfigError, DataError

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
# Settings that change no prepared data
NOT_CACHED = ("augment", "batch_size", "batches_per_epoch", "cache", "cache_dir", "num_workers", "reference",
              "residency", "seed")  # fmt: skip
WHERE = {"device": "the device", "host": "memory", "mmap": "disk", "workers": "worker processes"}


@dataclass
class Inputs:
    """Rows to predict for: their ids as the user knows them, and their tensors (sample axis first)."""

    ids: list[str]
    tensors: Batch


class Loading(TypedDict, total=False):
    """How the data of any datamodule is kept and read; a subclass passes these on as `**loading`.

    Attributes:
        residency: where the data stays: "device", "host" (in memory), "mmap" (in memory-mapped files), or "workers"
            (processes read each sample); "auto" chooses from its size and what is free. It never changes a batch.
        num_workers: processes that read samples one by one, where that is done; "auto" takes the cores but one.
        cache: whether what was read and decoded is kept in memory-mapped files, which the next run takes.
        cache_dir: folder of memory-mapped files.
    """

    residency: Kind
    num_workers: Annotated[int, Ge(0)] | Literal["auto"]
    cache: bool
    cache_dir: str


DEFAULTS: Loading = {"residency": "auto", "num_workers": "auto", "cache": False, "cache_dir": "data/cache"}


class DataModule(LightningDataModule):
    """Holds the splits of a data set as tensors and yields batches as dicts of tensors.

    A subclass gives `load_splits` (tensors per split; sets `facts` and what it fitted on the training split),
    and for prediction `read_inputs`, `fitted_state` and `load_fitted_state`. `prepare_data` may download.

    Args:
        batch_size: global batch size, over all devices.
        seed: of the order of samples and of augmentation (the splits have their own seed).
        reference: a known result for this data, e.g. `{label: "ridge regression", r2: 0.81}`; shown beside
            the test metrics.
        loading: where the data stays and how it is read, see `Loading`.

    Attributes:
        facts: what the data fixes for the task and its network (`num_classes`, `num_features`, ...).
        splits: "train", "val", "test" -> name -> tensor.
        label_key: the batch key of the target.
    """

    label_key = "label"
    # Whether an empty validation split was asked for; without validation the last checkpoint is tested.
    allows_empty_val = False

    def __init__(
        self,
        batch_size: Annotated[int, Ge(1)],
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__()
        self.loading: Loading = {**DEFAULTS, **loading}
        self.batch_size = batch_size
        self.seed = seed
        self.reference = dict(reference) if reference else None
        self.facts: dict[str, Any] = {}
        self.splits: dict[str, Batch] = {}
        self.skipped: list[str] = []
        self.settings: dict[str, Any] = {}  # the config's section, for the key of a cache; set by the wiring
        self.is_mapped = False  # whether the splits' memory is that of files
        self._residency: Residency | None = None
        self._on_device: dict[str, Batch | None] = {}  # None: it does not fit
        # Set by the wiring: what the network, the engine and the trainer need of the training loader.
        self.min_last_train = 1
        self.with_index = False
        self.batches_per_item: int | None = None
        self.cuts: set[int] = set()
        self.max_train_batches: int | None = None

    # ---- what a subclass gives -----------------------------------------------------------------------------

    def load_splits(self) -> dict[str, Batch]:
        """Reads the data, fits preprocessing on the training split, sets `facts`, returns the splits."""
        raise NotImplementedError

    def outline(self) -> dict[str, Batch] | None:
        """Splits on the device "meta" with `facts` set, where they are known without reading; otherwise None."""
        return None

    def read_inputs(self, path: Path) -> Inputs:
        """Reads rows to predict for, with the preprocessing that was fitted in training; no target needed.

        Raises:
            DataError: when the file cannot be read or does not have the columns of the training data.
        """
        raise ConfigError(f"{type(self).__name__} cannot read inputs from a file.")

    def fitted_state(self) -> dict[str, Any]:
        """What was fitted on the training split, as tensors and plain values; goes into the checkpoint."""
        return {}

    def load_fitted_state(self, state: dict[str, Any]) -> None:
        """Takes over what `fitted_state` gave, in place of reading training data."""

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """Converts and normalises a batch on its device; with a generator also augments it."""
        return batch

    def trim_batch(self, batch: Batch) -> Batch:
        """Cuts what no row of a batch needs, on the host before the batch goes to the device."""
        return batch

    def probes(self) -> Inputs | None:
        """Inputs whose predictions are reported after training, as `predict/<id>` in metrics.json."""
        return None

    @property
    def has_augmentation(self) -> bool:
        """Whether `transform_batch` draws random numbers for training batches."""
        return False

    @property
    def mixes_labels(self) -> bool:
        """Whether training batches have `label_probability` (B, num_classes), which the loss has to use."""
        return False

    # ---- cache -----------------------------------------------------------------------------------------------

    def source_paths(self) -> list[Path]:
        """Files and folders that the data is read from: a cache is made anew when one changes."""
        named = (getattr(self, name, None) for name in ("path", "val_path", "test_path"))
        return [Path(path) for path in named if path and Path(path).exists()]

    def cached_classes(self) -> list[type]:
        """Classes whose code prepares the data: a cache is made anew when it changes."""
        return [type(self)]

    def load_cached(self, write: Callable[[Path], None]) -> dict[str, Batch]:
        """The splits, facts and what was fitted, from the cache; `write` fills its folder where it is not there.

        Raises:
            ConfigError: when the cache cannot be written.
        """
        settings = {name: value for name, value in self.settings.items() if name not in NOT_CACHED}
        key = content_key({**settings, "version": leyden.__version__}, self.source_paths(), self.cached_classes())
        folder = Path(self.loading["cache_dir"]) / f"{type(self).__name__}-{key}"
        is_new, started = not folder.is_dir(), time.monotonic()
        build_once(folder, write)
        if is_new:
            log.info("Data read in %.1f s and kept in %s for the next run.", time.monotonic() - started, folder)
        else:
            log.info("Data from the cache %s.", folder)
        state = torch.load(folder / "state.pt", weights_only=True)
        self.facts, self.skipped = state["facts"], state["skipped"]
        self.load_fitted_state(state["fitted"])
        self.is_mapped = True
        return map_arrays(folder)

    def _write_splits(self, folder: Path) -> None:
        save_arrays(self.load_splits(), folder)
        state = {"facts": self.facts, "fitted": self.fitted_state(), "skipped": self.skipped}
        torch.save(state, folder / "state.pt")

    # ---- Lightning -----------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Loads the splits once.

        Raises:
            DataError: when a split is empty and that was not asked for.
        """
        if self.splits:
            return
        self.splits = self.load_cached(self._write_splits) if self.loading["cache"] else self.load_splits()
        for name in SPLITS:
            if self.num_samples(name) == 0 and not (name == "val" and self.allows_empty_val):
                raise DataError(
                    f"The {name} split of {self.describe()} is empty. "
                    "Check the data path and the sizes of the splits (data.val_frac, data.test_frac)."
                )

    def num_samples(self, split: str) -> int:
        """How many samples a split has."""
        tensors = self.splits.get(split)
        return len(next(iter(tensors.values()))) if tensors else 0

    @property
    def num_train_batches(self) -> int:
        """Global batches of a training epoch."""
        return len(self.make_loader("train", shuffle=True, grouped=False))

    def describe(self) -> str:
        """The data set's name for messages, with its path where it has one."""
        path = getattr(self, "path", None)
        return f"{type(self).__name__} ({path})" if path else type(self).__name__

    def fingerprint(self) -> dict[str, Any]:
        """Sample count and a hash of the content per split: equal data gives an equal fingerprint."""
        result: dict[str, Any] = {"source": self.describe()}
        for split in SPLITS:
            digest = hashlib.blake2b(digest_size=16)
            for name, tensor in sorted(self.splits.get(split, {}).items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(-1).numpy().data)
            result[split] = {"num_samples": self.num_samples(split), "hash": digest.hexdigest()}
        return result

    def make_loader(
        self, split: str, shuffle: bool, grouped: bool = True, batch_size: int | None = None, **changes: Any
    ) -> BatchLoader | list[Any]:
        """The loader of a split, or an empty list where the split is empty.

        Args:
            split: "train", "val" or "test".
            shuffle: whether each epoch has its own order.
            grouped: whether batches come as the training loop takes them, several at a time, or one by one.
            batch_size: where it is not the run's own.
            changes: further options of the loader that are not the run's own.
        """
        if self.num_samples(split) == 0:
            return []
        residency = self.choose_residency()
        options = {**self.loader_options(shuffle, grouped), **changes}
        if residency.kind == "device":
            options["device"] = None  # nothing is left to copy
        size = batch_size or self.batch_size
        if residency.kind == "workers":
            samples = Samples(Rows(self.splits[split]), split, (), self.seed)
            return WorkerLoader(samples, size, shuffle, self.seed, self.num_workers, **options)
        tensors = self.splits[split]
        if residency.kind == "device" and self.trainer:
            device = self.trainer.strategy.root_device
            if split not in self._on_device:
                self._on_device[split] = place(tensors, device, self.loading["residency"])
            placed = self._on_device[split]
            if placed is None:
                options["device"] = device
            tensors = tensors if placed is None else placed
        return TensorLoader(tensors, size, shuffle, self.seed, **options)

    def use_residency(self, kind: Kind) -> None:
        """Lets loaders that are made from now on take the data from somewhere else."""
        self.loading["residency"] = kind
        self._residency = None

    def loader_options(self, shuffle: bool, grouped: bool) -> dict[str, Any]:
        """What the trainer, the network and the engine ask of a loader."""
        trainer = self.trainer
        return {
            "rank": data_rank(trainer) if trainer else 0,
            "world_size": data_size(trainer) if trainer else 1,
            "min_last": self.min_last_train if shuffle else 1,
            "trim": self.trim_batch if self.trims else None,
            "batches_per_item": self.batches_per_item if shuffle and grouped else None,
            "cuts": self.cuts if shuffle and grouped else (),
            "max_batches": self.max_train_batches if shuffle and grouped else None,
            "with_index": self.with_index and shuffle,
            "device": trainer.strategy.root_device if trainer else None,
        }

    def first_rows(self, count: int) -> Batch:
        """The first training samples, as they lie in memory."""
        return {name: tensor[:count] for name, tensor in self.splits["train"].items()}

    @property
    def trims(self) -> bool:
        """Whether `trim_batch` does something."""
        return type(self).trim_batch is not DataModule.trim_batch

    @property
    def num_workers(self) -> int:
        """Processes that read samples one by one, where that is done."""
        wanted = self.loading["num_workers"]
        return default_num_workers() if wanted == "auto" else wanted

    def choose_residency(self) -> Residency:
        """Decides once where the data stays, and says so.

        Raises:
            ConfigError: when that cannot be.
        """
        if self._residency is None:
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            size = num_bytes(self.splits)
            room = Room(size, device, free_on(device), free_memory(), self.trims, self.is_mapped)
            self._residency = choose_residency(self.loading["residency"], room)
            if self._residency.kind == "mmap" and not self.is_mapped:
                self.splits = move_to_disk(self.splits, Path(self.loading["cache_dir"]))
                self.is_mapped = True
            log.info("Batches from %s: %s.", WHERE[self._residency.kind], self._residency.reason)
        return self._residency

    def train_dataloader(self) -> BatchLoader | list[Any]:
        loader = self.make_loader("train", shuffle=True)
        if isinstance(loader, BatchLoader) and loader.num_dropped:
            log.warning(
                "The last %d training sample(s) of each epoch are left out: too few for a batch of their own.",
                loader.num_dropped,
            )
        if 0 < (num_samples := self.num_samples("train")) < self.batch_size:
            log.warning(
                "data.batch_size is %d, but there are only %d training samples, so an epoch is one batch of %d.",
                self.batch_size,
                num_samples,
                num_samples,
            )
        return loader

    def val_dataloader(self) -> BatchLoader | list[Any]:
        return self.make_loader("val", shuffle=False)

    def test_dataloader(self) -> BatchLoader | list[Any]:
        return self.make_loader("test", shuffle=False)

    def on_after_batch_transfer(
        self, batch: Batch | list[Batch] | Batches, dataloader_idx: int
    ) -> Batch | list[Batch] | Batches:
        trainer = self.trainer
        if trainer is None or not trainer.training:
            assert isinstance(batch, dict)
            return self.transform_batch(batch, None)
        loader = trainer.train_dataloader
        first = loader.batch_indices(loader.current_item).start if isinstance(loader, BatchLoader) else 0
        if isinstance(batch, dict):
            return self.transform_batch(batch, self._generator(batch, first))
        if isinstance(batch, list):
            num_samples = sum(len(next(iter(one.values()))) for one in batch)
            batch = Batches(len(batch), batch.__getitem__, num_samples)
        return batch.map(lambda index, one: self.transform_batch(one, self._generator(one, first + index)))

    def _generator(self, batch: Batch, index: int) -> torch.Generator | None:
        """The source of augmentation for a batch of an epoch, by its position alone."""
        if not self.has_augmentation or self.trainer is None:
            return None
        seed = derive_seed(self.seed, "augment", self.trainer.current_epoch, index, data_rank(self.trainer))
        return torch.Generator(next(iter(batch.values())).device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"facts": self.facts, "fitted": self.fitted_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.facts = state_dict["facts"]
        self.load_fitted_state(state_dict["fitted"])


def stack_column(values: list[Any], dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor of a Python list (also of an empty one)."""
    return torch.tensor(values, dtype=dtype).reshape(len(values))
