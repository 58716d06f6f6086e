"""Where data stays: the choice and its reason, and that it never changes a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.data.loaders import BatchLoader, TensorLoader
from leyden.data.residency import (
    Room,
    choose_residency,
    format_bytes,
    free_memory,
    map_arrays,
    move_to_disk,
    num_bytes,
    place,
    save_arrays,
)
from leyden.data.workers import Rows, Samples, WorkerLoader
from leyden.errors import ConfigError

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def room(size: int, device: torch.device = CPU, on_device: int = 8 * GIB, **changes: Any) -> Room:
    return Room(size, device, on_device, 16 * GIB, **changes)


@pytest.mark.parametrize(
    ("wanted", "room", "kind", "reason"),
    [
        ("auto", room(GIB), "host", "1.0 GiB, which the CPU reads in place"),
        ("auto", room(12 * GIB), "mmap", "12.0 GiB are much for 16.0 GiB of free memory"),
        ("auto", room(GIB, is_mapped=True), "mmap", "1.0 GiB in memory-mapped files"),
        ("auto", room(4 * GIB, GPU), "device", "4.0 GiB fit on cuda:0, 8.0 GiB free"),
        ("auto", room(4 * GIB + 1, GPU), "host", "4.0 GiB are much for cuda:0, 8.0 GiB free"),
        ("auto", room(GIB, GPU, trims=True), "host", "cut to their content"),
        ("device", room(7 * GIB, GPU), "device", "asked for"),
        ("device", room(GIB), "host", "which is the device's"),
        ("mmap", room(GIB), "mmap", "asked for"),
        ("workers", room(GIB), "workers", "asked for"),
    ],
)
def test_choice(wanted: Any, room: Room, kind: str, reason: str) -> None:
    found = choose_residency(wanted, room)
    assert found.kind == kind
    assert reason in found.reason


def test_what_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"takes 9\.0 GiB and cuda:0 has 8\.0 GiB free\. Use data\.residency=host"):
        choose_residency("device", room(9 * GIB, GPU))
    with pytest.raises(ConfigError, match=r"takes 20\.0 GiB, and 16\.0 GiB of memory are free\. .*residency=mmap"):
        choose_residency("host", room(20 * GIB, is_mapped=True))


def test_sizes() -> None:
    assert [format_bytes(n) for n in (5, 1536, 2**20, 5 * GIB, 3 * 2**40)] == [
        "5 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert num_bytes({"train": {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.uint8)}}) == 12 + 4
    assert 0 < free_memory() < 2**50


def splits() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (50, 1, 3, 3), generator=generator, dtype=torch.uint8)
    return {"train": {"image": image, "label": torch.arange(50)}, "val": {"label": torch.arange(3)}}


def test_arrays_come_back_and_files_are_never_changed(tmp_path: Path) -> None:
    save_arrays(splits(), tmp_path)
    for _ in range(2):
        mapped = map_arrays(tmp_path)
        assert {name: set(split) for name, split in mapped.items()} == {"train": {"image", "label"}, "val": {"label"}}
        for name, split in splits().items():
            for key, tensor in split.items():
                assert mapped[name][key].equal(tensor)
                assert mapped[name][key].dtype == tensor.dtype
        mapped["train"]["label"].fill_(-1)


def test_files_of_one_run_are_gone_when_it_has_mapped_them(tmp_path: Path) -> None:
    mapped = move_to_disk(splits(), tmp_path / "cache")
    assert mapped["train"]["image"].equal(splits()["train"]["image"])
    assert list((tmp_path / "cache").iterdir()) == []


def test_too_little_space_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match=r"has 10 B free\. Choose another folder with paths\.data=FOLDER"):
        move_to_disk(splits(), tmp_path)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("place", ["mapped", "workers", "this process"])
def test_batches_are_those_of_memory(tmp_path: Path, world_size: int, place: str) -> None:
    save_arrays(splits(), tmp_path)
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "with_index": True, "batches_per_item": 2}
        plain = TensorLoader(splits()["train"], 8, True, 3, **options)
        loader: BatchLoader
        if place == "mapped":
            loader = TensorLoader(map_arrays(tmp_path)["train"], 8, True, 3, **options)
        else:
            samples = Samples(Rows(splits()["train"]), "train", (), 3)
            loader = WorkerLoader(samples, 8, True, 3, num_workers=2 if place == "workers" else 0, **options)
        for epoch in (0, 1):
            plain.set_epoch(epoch)
            loader.set_epoch(epoch)
            for expected, found in zip(plain, loader, strict=True):
                for one, other in zip(expected, found, strict=True):
                    assert one.keys() == other.keys()
                    assert all(one[name].equal(other[name]) for name in one)


# ---- a device that is fuller than it seemed ----------------------------------------------------------------------


class Full:
    """A tensor that finds no memory on a device."""

    nbytes = 3 * 2**20

    def to(self, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 3.00 MiB on {device}.\nMore of it.")


def test_what_does_not_fit_after_all_stays_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    split: Any = {"image": Full()}
    assert place(split, GPU, "auto") is None
    assert caplog.messages == [
        "Batches from memory after all, copied ahead: 3.0 MiB do not fit on cuda:0: "
        "CUDA out of memory. Tried to allocate 3.00 MiB on cuda:0."
    ]
    with pytest.raises(ConfigError, match=r"`data\.residency` is device, but 3\.0 MiB do not fit on cuda:0: CUDA out"):
        place(split, GPU, "device")
    placed = place(splits()["train"], CPU, "auto")
    assert placed is not None
    assert placed["label"].equal(torch.arange(50))
