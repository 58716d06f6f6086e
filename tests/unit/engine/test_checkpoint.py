"""Checkpoint files: whole or not there, kept in a row, beside the training, and never executed."""

from __future__ import annotations

import pickle
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.engine import checkpoint as module
from leyden.engine.checkpoint import CheckpointWriter, kept_paths, read_checkpoint, write_checkpoint
from leyden.errors import DataError, TrainingError


def state(number: float) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((300, 10), number)}, "leyden": {"metrics": {}}}


def number_of(path: Path) -> float:
    return float(read_checkpoint(path)["state_dict"]["w"][0, 0])


# ---- writing -----------------------------------------------------------------------------------------------------


def test_newest_are_kept_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for number in range(5):
        write_checkpoint(state(number), path, keep=3)
    assert [number_of(kept) for kept in kept_paths(path, 3)] == [4, 3, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last-1.ckpt", "last-2.ckpt", "last.ckpt"]


def test_second_place_has_the_same_content_and_its_own_life(tmp_path: Path) -> None:
    last, best = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    write_checkpoint(state(1), last, also=best)
    assert best.read_bytes() == last.read_bytes()
    assert best.stat().st_ino == last.stat().st_ino  # one copy on the disk
    write_checkpoint(state(2), last)
    assert (number_of(best), number_of(last)) == (1, 2)


def test_second_place_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(module.os, "link", refuse)
    write_checkpoint(state(1), tmp_path / "last.ckpt", also=tmp_path / "best.ckpt")
    assert number_of(tmp_path / "best.ckpt") == 1


def test_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(state(1), path, keep=2)

    def fill_the_disk(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(TrainingError, match=r"No space left on device.*The last good checkpoint is .*last\.ckpt"):
        write_checkpoint(state(2), path, keep=2)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert number_of(path) == 1


# ---- beside the training -----------------------------------------------------------------------------------------


def test_training_goes_on_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, real = threading.Event(), torch.save

    def slow_save(*arguments: Any) -> None:
        assert may_write.wait(30)
        real(*arguments)

    monkeypatch.setattr(torch, "save", slow_save)
    writer, content = CheckpointWriter(), state(1)
    writer.save_checkpoint(content, tmp_path / "last.ckpt")
    content["state_dict"]["w"].fill_(99)  # the next steps
    assert not (tmp_path / "last.ckpt").exists()
    may_write.set()
    writer.wait()
    assert number_of(tmp_path / "last.ckpt") == 1
    writer.teardown()


def test_memory_of_a_copy_is_taken_again_where_it_fits(tmp_path: Path) -> None:
    writer, path = CheckpointWriter(), tmp_path / "last.ckpt"
    addresses = []
    for content in (state(1), state(2), {**state(3), "more": torch.ones(3)}, {"state_dict": {"w": torch.ones(2)}}):
        writer.save_checkpoint({"leyden": {}, **content}, path, {"keep": 4})
        writer.wait()
        addresses.append(writer._copies[0].data_ptr())
    writer.teardown()
    assert addresses[0] == addresses[1] == addresses[2]
    shapes = [read_checkpoint(kept)["state_dict"]["w"].shape for kept in kept_paths(path, 4)]
    assert shapes == [(2,), (300, 10), (300, 10), (300, 10)]
    assert [number_of_flat(kept) for kept in kept_paths(path, 4)] == [1, 3, 2, 1]


def test_held_state_is_written_when_it_has_to_be(tmp_path: Path) -> None:
    writer, last, best = CheckpointWriter(), tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    held = {"also": best, "hold": True}
    tensor = torch.full((300, 10), 1.0)
    checkpoint = {"state_dict": {"w": tensor}, "leyden": {}}
    writer.save_checkpoint(checkpoint, last, held)
    assert not list(tmp_path.iterdir())
    writer.save_checkpoint(checkpoint, last, held)  # takes the place of the one before
    tensor.fill_(2.0)
    writer.save_checkpoint(checkpoint, last)  # leaves the second place to the one before
    tensor.fill_(3.0)
    writer.save_checkpoint(checkpoint, last, held)
    tensor.fill_(4.0)
    assert (number_of(best), number_of(last)) == (1.0, 2.0)
    writer.wait()
    assert (number_of(best), number_of(last)) == (3.0, 3.0)
    writer.save_checkpoint(checkpoint, last, held)
    writer.teardown()
    assert (number_of(best), number_of(last)) == (4.0, 4.0)


def number_of_flat(path: Path) -> float:
    return float(read_checkpoint(path)["state_dict"]["w"].flatten()[0])


def test_lent_content_is_loaded_once_and_from_its_path_only(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    path, other = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    write_checkpoint(state(1), path, also=other)
    lent = state(2)
    writer.lend(path, lent)
    assert writer.load_checkpoint(str(path)) is lent
    assert float(writer.load_checkpoint(str(path))["state_dict"]["w"][0, 0]) == 1
    writer.lend(path, lent)
    assert float(writer.load_checkpoint(str(other))["state_dict"]["w"][0, 0]) == 1
    writer.lend(path, lent)
    writer.save_checkpoint(state(3), path)
    assert float(writer.load_checkpoint(str(path))["state_dict"]["w"][0, 0]) == 3
    writer.teardown()


def test_what_went_wrong_is_raised_at_the_next_call(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    writer = CheckpointWriter()
    writer.save_checkpoint(state(1), blocked / "last.ckpt")
    with pytest.raises(TrainingError, match="could not be written"):
        writer.save_checkpoint(state(2), tmp_path / "last.ckpt")
    writer.wait()  # said once


def test_end_of_the_run_waits_and_logs_what_went_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    writer = CheckpointWriter()
    writer.save_checkpoint(state(1), blocked / "last.ckpt")
    writer.teardown()
    assert "could not be written" in caplog.text
    writer.save_checkpoint(state(3), tmp_path / "last.ckpt")  # another fit
    writer.teardown()
    assert number_of(tmp_path / "last.ckpt") == 3


# ---- reading -----------------------------------------------------------------------------------------------------


def flip_a_byte(path: Path) -> None:
    """Changes one byte of the largest record, as a failing disk does; the archive itself stays well formed."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    content[record.header_offset + len(record.filename) + 200] ^= 0xFF
    path.write_bytes(content)


def test_one_wrong_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(state(1), path)
    flip_a_byte(path)
    torch.load(path, weights_only=True)  # which does not see it
    with pytest.raises(DataError, match=r"last\.ckpt is damaged: the checksum of .*data/0 is wrong"):
        read_checkpoint(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_file_is_damaged(tmp_path: Path, share: float) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(state(1), path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=r"last\.ckpt does not load as a checkpoint, so it is damaged"):
        read_checkpoint(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no checkpoint .*nothing\.ckpt"):
        read_checkpoint(tmp_path / "nothing.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(DataError, match=r"foreign\.ckpt was not written by Leyden"):
        read_checkpoint(tmp_path / "foreign.ckpt")


class Bomb:
    """Would make a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    torch.save({"leyden": Bomb(tmp_path / "executed")}, tmp_path / "bomb.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps({"leyden": Bomb(tmp_path / "executed")}))
    for name in ("bomb.ckpt", "plain.ckpt"):
        with pytest.raises(DataError):
            read_checkpoint(tmp_path / name)
    assert not (tmp_path / "executed").exists()
