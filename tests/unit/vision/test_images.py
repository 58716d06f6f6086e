"""Pictures of every mode, size and orientation as tensors of one kind; values computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leyden.errors import DataError
from leyden.vision.images import SUFFIXES, load_image, load_images, to_channels


def save(image: Image.Image, folder: Path, name: str = "x.png", **options: object) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


def pixel(mode: str, value: object) -> Image.Image:
    return Image.new(mode, (2, 2), value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "value", "rgb"),
    [
        ("L", 77, (77, 77, 77)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (200, 200, 200)),  # transparent: the background
        ("LA", (50, 255), (50, 50, 50)),
        ("LA", (50, 0), (200, 200, 200)),
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
        ("I;16", 257 * 200, (200, 200, 200)),  # 0 .. 65535 is 0 .. 255 times 257
        ("I", 65535, (255, 255, 255)),
        ("I", 70000, (255, 255, 255)),
        ("F", 12.4, (12, 12, 12)),
        ("F", -3.0, (0, 0, 0)),
    ],
)
def test_any_mode_as_colour_and_grey(mode: str, value: object, rgb: tuple[int, int, int]) -> None:
    colour = to_channels(pixel(mode, value), 3, background=200)
    assert colour.mode == "RGB"
    assert colour.getpixel((1, 1)) == rgb
    grey = to_channels(pixel(mode, value), 1, background=200)
    assert grey.mode == "L"
    # ITU-R 601: L = 0.299 R + 0.587 G + 0.114 B
    assert grey.getpixel((1, 1)) == pytest.approx(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2], abs=1)


def test_half_transparent_is_half_way_to_the_background() -> None:
    # 0.5 * 100 + 0.5 * 200 = 150
    found = to_channels(pixel("RGBA", (100, 100, 100, 128)), 3, background=200).getpixel((0, 0))
    assert found == pytest.approx((150, 150, 150), abs=1)


def test_palette_with_a_transparent_colour(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    path = save(image, tmp_path, "x.gif", transparency=1)
    found = load_image(path, 3, 1, background=255)
    assert found.shape == (3, 1, 1)
    with Image.open(path) as opened:
        both = to_channels(opened, 3, background=255)
    assert [both.getpixel((0, 0)), both.getpixel((1, 0))] == [(10, 20, 30), (255, 255, 255)]


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    found = load_image(save(Image.fromarray(values), tmp_path), 3, 5, 255)
    assert found.dtype == torch.uint8
    assert found.permute(1, 2, 0).numpy().tolist() == values.tolist()


def test_others_are_cropped_to_the_centre_and_resized(tmp_path: Path) -> None:
    values = np.zeros((4, 12), dtype=np.uint8)
    values[:, 3:9] = 90  # the middle square of 4 x 4, and one column that Pillow's filter sees on each side
    found = load_image(save(Image.fromarray(values), tmp_path), 1, 2, 255)
    assert found.tolist() == [[[90, 90], [90, 90]]]


def test_pictures_are_turned_upright(tmp_path: Path) -> None:
    """EXIF orientation 3 is upside down: the first pixel is the last."""
    values = np.arange(9, dtype=np.uint8).reshape(3, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = 3
    found = load_image(save(Image.fromarray(values), tmp_path, exif=exif), 1, 3, 255)
    assert found[0].tolist() == values[::-1, ::-1].tolist()


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n cut off"])
def test_unreadable_file_is_named_with_its_full_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.png"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_image(path, 3, 4, 255)
    assert str(caught.value).startswith(f"{path} cannot be read as a picture: ")


def test_cut_off_picture_is_unreadable(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    path = save(Image.fromarray(values), tmp_path, "x.jpg")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(DataError, match="cannot be read as a picture"):
        load_image(path, 3, 8, 255)


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    paths = [save(pixel("L", value), tmp_path, f"{value}.png") for value in range(0, 200, 7)]
    images, kept, skipped = load_images(paths, 1, 2, 255, "raise")
    assert images[:, 0, 0, 0].tolist() == list(range(0, 200, 7))
    assert kept == list(range(len(paths)))
    assert skipped == []


def test_no_pictures() -> None:
    images, kept, skipped = load_images([], 3, 4, 255, "raise")
    assert images.shape == (0, 3, 4, 4)
    assert (kept, skipped) == ([], [])


def test_bad_pictures_stop_or_are_left_out(tmp_path: Path) -> None:
    paths = [save(pixel("L", value), tmp_path, f"{value}.png") for value in (10, 20, 30)]
    paths[1].write_bytes(b"")
    images, kept, skipped = load_images(paths, 1, 2, 255, "skip")
    assert images[:, 0, 0, 0].tolist() == [10, 30]
    assert kept == [0, 2]
    assert len(skipped) == 1
    assert str(paths[1]) in skipped[0]
    with pytest.raises(
        DataError, match=r"20\.png.*Remove the file, or use data\.on_error=skip to leave such files out"
    ):
        load_images(paths, 1, 2, 255, "raise")


def test_kinds_of_files_are_lower_case_suffixes() -> None:
    assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in SUFFIXES)
    assert {".png", ".jpg", ".jpeg"} <= SUFFIXES
