"""Data that is a user's own Dataset: map-style with every guarantee, or a stream with those that hold."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from annotated_types import Ge
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from leyden.data.datamodule import SPLITS, DataModule, Loading
from leyden.data.loaders import Batch, BatchLoader
from leyden.data.residency import Kind, Residency
from leyden.data.workers import Failure, Samples, StreamLoader, WorkerLoader, collate
from leyden.errors import ConfigError, DataError

log = logging.getLogger(__name__)

READ_AT_A_TIME = 256  # samples


class DatasetData(DataModule):
    """Batches of your own Datasets, read sample by sample in worker processes.

    A sample is a dict, or a tuple of values for `keys`; values become tensors, float64 becomes float32, and uint8
    images become 0 .. 1. Before a sample is read, the random generators are seeded from (seed, epoch, sample), so
    augmentation inside the Dataset does not depend on the number of workers.

    Args:
        train: a Dataset; `_target_` and its arguments in a config.
        test: a Dataset; null for none, with test=false.
        val: a Dataset; null for none.
        keys: names of the values where a sample is a tuple; the last one is the target.
        facts: what the network has to know of the data: `num_classes`, `class_names`, `num_features`, `in_channels`,
            `vocab_size`, ... Sizes of images and vectors are taken from the first sample, classes from a Dataset's
            `classes`.
        batches_per_epoch: batches that count as an epoch, for a stream that does not know its length.
        batch_size: global batch size.
        seed: of the order of samples, and of random numbers in them.
        reference: a known result for this data.
        loading: how it is read; residency is "workers".
    """

    def __init__(
        self,
        train: Dataset[Any],
        test: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        keys: Sequence[str] = ("image", "label"),
        facts: Mapping[str, Any] | None = None,
        batches_per_epoch: Annotated[int, Ge(1)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 128,
        seed: Annotated[int, Ge(0)] = 0,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, reference, **loading)
        if not self.loading["cache"] and self.loading["residency"] not in ("auto", "workers"):
            raise ConfigError(
                f"`data.residency` is {self.loading['residency']}, but samples of a Dataset are read by workers. "
                "Use data.residency=auto, or data.cache=true, which reads them once into memory-mapped files."
            )
        self.datasets = {"train": train, "val": val, "test": test}
        self.keys = tuple(keys)
        self.label_key = self.keys[-1]
        self.given_facts = dict(facts or {})
        self.batches_per_epoch = batches_per_epoch
        self.allows_empty_val = val is None
        self._residency = Residency("workers", f"{self.num_workers} read the samples of {type(train).__name__}")
        self._is_set_up = False

    # ---- what is there ---------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Looks at the first sample.

        Raises:
            DataError: when a split is empty, or its first sample cannot be read.
            ConfigError: when a stream has no length.
        """
        if self._is_set_up:
            return
        for split in SPLITS:
            dataset = self.datasets[split]
            if dataset is not None and self.num_samples(split) == 0:
                raise DataError(f"The {split} split ({type(dataset).__name__}) is empty.")
        train = self.datasets["train"]
        if self.loading["cache"]:
            self.splits = self.load_cached(self._write_samples)
            self._residency = None  # they are tensors now
        first = self.first_rows(1)
        self.facts = {**self._find_facts(first), **self.given_facts}
        if isinstance(train, IterableDataset):
            log.warning(
                "%s is a stream, so its order is its own: shuffling, equal batches on any number of processes or "
                "workers, and each sample once an epoch are up to it, and a resumed run reads it from the start.",
                type(train).__name__,
            )
        if not self.splits:
            log.info("Batches from worker processes: %s.", self.choose_residency().reason)
        self._is_set_up = True

    def cached_classes(self) -> list[type]:
        return [type(self), *(type(dataset) for dataset in self.datasets.values() if dataset is not None)]

    def _write_samples(self, folder: Path) -> None:
        """Reads each sample once, into memory-mapped files."""
        for split, dataset in self.datasets.items():
            if dataset is None:
                continue
            if isinstance(dataset, IterableDataset):
                raise ConfigError(f"`data.cache` is true, but data.{split} ({type(dataset).__name__}) is a stream.")
            samples = Samples(dataset, split, self.keys, self.seed)
            loader = WorkerLoader(samples, READ_AT_A_TIME, False, self.seed, self.num_workers)
            files: dict[str, Any] = {}
            batches = track(
                loader.batches(), f"reading {split}", len(loader), console=Console(stderr=True), transient=True
            )
            for index, batch in enumerate(batches):
                for name, tensor in batch.items():
                    if name not in files:
                        shape, path = (len(samples.dataset), *tensor.shape[1:]), folder / f"{split}.{name}.npy"  # type: ignore[arg-type]
                        files[name] = np.lib.format.open_memmap(path, "w+", tensor.numpy().dtype, shape)
                    start = index * READ_AT_A_TIME
                    files[name][start : start + len(tensor)] = tensor.numpy()
            for file in files.values():
                file.flush()
        torch.save({"facts": {}, "fitted": {}, "skipped": []}, folder / "state.pt")

    def _find_facts(self, first: Batch) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if "image" in first:
            facts |= {"in_channels": first["image"].shape[1], "image_size": first["image"].shape[-1]}
        if "features" in first:
            facts["num_features"] = first["features"].shape[-1]
        if "target" in first:
            facts["num_targets"] = first["target"].shape[-1]
        classes = self.given_facts.get("class_names", getattr(self.datasets["train"], "classes", None))
        if classes is None and "num_classes" in self.given_facts:
            classes = range(self.given_facts["num_classes"])
        if classes is not None:
            facts |= {"class_names": [str(name) for name in classes], "num_classes": len(classes)}
        return facts

    def num_samples(self, split: str) -> int:
        dataset = self.datasets[split]
        if dataset is None:
            return 0
        if isinstance(dataset, IterableDataset) and split == "train" and self.batches_per_epoch is not None:
            return self.batches_per_epoch * self.batch_size
        try:
            return len(dataset)  # type: ignore[arg-type]
        except TypeError as err:
            advice = "Set data.batches_per_epoch" if split == "train" else "Give it a __len__"
            raise ConfigError(
                f"`data.{split}` ({type(dataset).__name__}) does not say how long it is. {advice}."
            ) from err

    def first_rows(self, count: int) -> Batch:
        """The first training samples."""
        if self.splits:
            return super().first_rows(count)
        train = self.datasets["train"]
        assert train is not None
        if isinstance(train, IterableDataset):
            loader = self._stream_loader("train", train, count, 0)
            return next(loader.batches())
        rows = Samples(train, "train", self.keys, self.seed)[0, range(min(count, self.num_samples("train")))]
        batch = collate(rows)
        if isinstance(batch, Failure):
            raise DataError(batch.message)
        return batch

    def describe(self) -> str:
        return type(self.datasets["train"]).__name__

    def fingerprint(self) -> dict[str, Any]:
        """Sample counts, and a hash of the first and the last sample of each split: a Dataset may be slow to read."""
        if self.splits:
            return super().fingerprint()
        result: dict[str, Any] = {"source": self.describe()}
        for split, dataset in self.datasets.items():
            count = self.num_samples(split)
            digest = hashlib.blake2b(digest_size=16)
            if dataset is not None and not isinstance(dataset, IterableDataset):
                rows = Samples(dataset, split, self.keys, self.seed)[0, [0, count - 1]]
                batch = collate(rows) if not isinstance(rows, Failure) else {}
                for name, tensor in sorted(batch.items()) if not isinstance(batch, Failure) else []:
                    digest.update(name.encode())
                    digest.update(tensor.contiguous().numpy().tobytes())
            result[split] = {"num_samples": count, "hash": digest.hexdigest()}
        return result

    def use_residency(self, kind: Kind) -> None:
        if self.splits:
            super().use_residency(kind)
        elif kind not in ("auto", "workers"):
            raise ConfigError(f"The samples of {self.describe()} are read by workers; they cannot stay in {kind}.")

    # ---- batches -----------------------------------------------------------------------------------------------

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        return {name: _to_unit(tensor) if name == "image" else tensor for name, tensor in batch.items()}

    def make_loader(
        self, split: str, shuffle: bool, grouped: bool = True, batch_size: int | None = None, **changes: Any
    ) -> BatchLoader | list[Any]:
        if self.splits:
            return super().make_loader(split, shuffle, grouped, batch_size, **changes)
        dataset = self.datasets[split]
        if dataset is None:
            return []
        options = {**self.loader_options(shuffle, grouped), **changes}
        size = batch_size or self.batch_size
        if isinstance(dataset, IterableDataset):
            return self._stream_loader(split, dataset, size, self.num_workers, **options)
        samples = Samples(dataset, split, self.keys, self.seed)
        return WorkerLoader(samples, size, shuffle, self.seed, self.num_workers, **options)

    def _stream_loader(
        self, split: str, dataset: IterableDataset[Any], batch_size: int, num_workers: int, **options: Any
    ) -> StreamLoader:
        batches = math.ceil(self.num_samples(split) / self.batch_size)
        for name in ("min_last", "trim"):
            options.pop(name, None)
        return StreamLoader(
            dataset, split, self.keys, batch_size, batches, num_workers, goes_on=split == "train", **options
        )


def _to_unit(image: Tensor) -> Tensor:
    return image.float().div_(255) if image.dtype == torch.uint8 else image
