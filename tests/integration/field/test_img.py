"""Pictures: any mode, any orientation, damaged files, and the same class numbers in every split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from field_data import PICTURES, SMALL, write_pictures
from PIL import Image

from leyden.errors import DataError
from leyden.runs.evaluate import evaluate_run
from leyden.runs.predict import predict_file
from leyden.runs.restore import load_checkpoint, restore
from leyden.vision.images import load_image

# ---- IMG-01: modes ----------------------------------------------------------------------------------------------

GREY = 100
SIZE = (8, 8)


def palette(transparent: bool) -> Image.Image:
    """A picture with a palette, of one red colour; half of it transparent on request."""
    image = Image.new("P", SIZE, 1)
    image.putpalette([0, 0, 0, 200, 40, 10] + [0] * 756)
    if transparent:
        image.paste(0, (0, 0, 8, 4))
        image.info["transparency"] = 0
    return image


def half(image: Image.Image) -> Image.Image:
    """The same picture with its upper half transparent."""
    alpha = Image.new("L", SIZE, 255)
    alpha.paste(0, (0, 0, 8, 4))
    image.putalpha(alpha)
    return image


# name -> picture, value of the lower half, value of the upper half (None: the background)
MODES: dict[str, tuple[Image.Image, tuple[int, int, int], tuple[int, int, int] | None]] = {
    "bit.png": (Image.new("1", SIZE, 1), (255, 255, 255), (255, 255, 255)),
    "L.png": (Image.new("L", SIZE, GREY), (GREY,) * 3, (GREY,) * 3),
    "L.jpg": (Image.new("L", SIZE, GREY), (GREY,) * 3, (GREY,) * 3),
    "LA.png": (half(Image.new("L", SIZE, GREY)), (GREY,) * 3, None),
    "P.png": (palette(False), (200, 40, 10), (200, 40, 10)),
    "P.gif": (palette(False), (200, 40, 10), (200, 40, 10)),
    "P-transparent.png": (palette(True), (200, 40, 10), None),
    "P-transparent.gif": (palette(True), (200, 40, 10), None),
    "RGB.png": (Image.new("RGB", SIZE, (200, 40, 10)), (200, 40, 10), (200, 40, 10)),
    "RGB.bmp": (Image.new("RGB", SIZE, (200, 40, 10)), (200, 40, 10), (200, 40, 10)),
    "RGBA.png": (half(Image.new("RGB", SIZE, (200, 40, 10))), (200, 40, 10), None),
    "RGBA.webp": (half(Image.new("RGB", SIZE, (200, 40, 10))), (200, 40, 10), None),
    # Ink of 55, 215, 245 out of 255: Pillow's colours are 255 - ink
    "CMYK.tif": (Image.new("CMYK", SIZE, (55, 215, 245, 0)), (200, 40, 10), (200, 40, 10)),
    "CMYK.jpg": (Image.new("CMYK", SIZE, (55, 215, 245, 0)), (200, 40, 10), (200, 40, 10)),
    # 16 bits: 100 of 255 is 25700 of 65535
    "I16.png": (Image.fromarray(np.full(SIZE, GREY * 257, np.uint16)), (GREY,) * 3, (GREY,) * 3),
    "I.tif": (Image.fromarray(np.full(SIZE, GREY * 257, np.int32)), (GREY,) * 3, (GREY,) * 3),
    "F.tif": (Image.fromarray(np.full(SIZE, float(GREY), np.float32)), (GREY,) * 3, (GREY,) * 3),
}


def write_modes(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, (image, _, _) in MODES.items():
        image.copy().save(folder / name, **({"transparency": 0} if name.startswith("P-") else {}))


@pytest.mark.parametrize("in_channels", [1, 3])
def test_img_01_every_mode_has_the_asked_channels_and_colours(workspace: Path, in_channels: int) -> None:
    write_modes(Path("modes"))
    for name, (_, lower, upper) in MODES.items():
        for background in (255, 30):
            pixels = load_image(Path("modes") / name, in_channels, 8, background)
            assert pixels.shape == (in_channels, 8, 8), name
            assert pixels.dtype == torch.uint8, name
            for row, colour in ((6, lower), (1, upper or (background,) * 3)):
                # ITU-R 601-2: the luma that Pillow documents for grey
                luma = round(sum(share * value for share, value in zip((0.299, 0.587, 0.114), colour, strict=True)))
                expected = colour if in_channels == 3 else (luma,)
                tolerance = 3 if name.endswith((".jpg", ".webp")) else 1  # these two lose a little
                assert pixels[:, row, 4].tolist() == pytest.approx(expected, abs=tolerance), (name, row)


@pytest.mark.parametrize("in_channels", [1, 3])
def test_img_01_a_folder_of_all_modes_trains(train: Callable, workspace: Path, in_channels: int) -> None:
    write_modes(Path("pictures") / "train" / "ant")
    for split in ("train", "val", "test"):
        write_pictures(Path("pictures") / split, {"ant": 3, "bee": 6})
    result = train(*SMALL, *PICTURES, "data.batch_size=4", f"data.in_channels={in_channels}")
    assert result.exit_code == 0, result.output
    assert f"Data: ImageFolder (pictures): {len(MODES) + 9} train" in result.output
    assert len(predict_file(result.folder, Path("pictures/train/ant"))) == len(MODES) + 3


# ---- IMG-03: orientation ----------------------------------------------------------------------------------------

# EXIF orientation -> what was done to the upright picture before it was stored
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def upright(size: tuple[int, int]) -> Image.Image:
    """Noise, so that no turn of the picture is like another."""
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def write_turned(image: Image.Image, path: Path, orientation: int, **options: object) -> None:
    turn = STORED[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    (image if turn is None else image.transpose(turn)).save(path, exif=exif, **options)


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_img_03_all_orientations_give_the_upright_pixels(workspace: Path, suffix: str) -> None:
    image = upright((6, 6))
    options = {"lossless": True} if suffix == "webp" else {}
    for orientation in STORED:
        write_turned(image, Path(f"{orientation}.{suffix}"), orientation, **options)
        pixels = load_image(Path(f"{orientation}.{suffix}"), 3, 6, 255)
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image)), orientation


def test_img_03_turned_photo_has_the_prediction_of_the_upright_one(train: Callable, workspace: Path) -> None:
    write_pictures("pictures", {"ant": 12, "bee": 12})
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 0, result.output
    # Flat blocks of 8 x 8 pixels, which JPEG stores exactly; 4 x 2 of them, not square
    blocks = np.random.default_rng(0).integers(0, 8, (2, 4, 1)) * 32
    image = Image.fromarray(np.kron(blocks, np.ones((8, 8, 1))).astype(np.uint8)[:, :, 0]).convert("RGB")
    Path("exif").mkdir()
    for orientation in STORED:
        write_turned(image, Path("exif") / f"{orientation}.jpg", orientation, quality=100, subsampling=0)
    probabilities = predict_file(result.folder, Path("exif"))["probability"].to_list()
    assert probabilities == pytest.approx([probabilities[0]] * 8, abs=1e-4)
    image.transpose(Image.Transpose.ROTATE_90).save("exif/sideways.jpg", quality=100, subsampling=0)
    sideways = predict_file(result.folder, Path("exif/sideways.jpg"))["probability"][0]
    assert abs(sideways - probabilities[0]) > 1e-3  # the network does see a difference


# ---- IMG-04: damaged files --------------------------------------------------------------------------------------


def write_damaged(folder: Path) -> list[Path]:
    """A truncated JPEG, an empty PNG and a text file, among good pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    upright((64, 64)).save(folder / "whole.jpg")
    content = (folder / "whole.jpg").read_bytes()
    (folder / "whole.jpg").unlink()
    damaged = [folder / "truncated.jpg", folder / "empty.png", folder / "text.jpg"]
    for path, part in zip(damaged, (content[: len(content) // 2], b"", b"no picture at all"), strict=True):
        path.write_bytes(part)
    return damaged


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_img_04_damaged_file_is_named_with_its_path(train: Callable, workspace: Path, kind: int) -> None:
    write_pictures("pictures", {"ant": 12, "bee": 12})
    damaged = write_damaged(Path("pictures") / "ant")
    for path in damaged:
        if path != damaged[kind]:
            path.unlink()
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 1
    assert f"DataError: {damaged[kind].absolute()} cannot be read as a picture" in result.output
    assert "data.on_error=skip" in result.output
    assert "Traceback" not in result.output


def test_img_04_skipped_files_are_listed_and_not_counted(train: Callable, workspace: Path) -> None:
    for split in ("train", "val", "test"):
        write_pictures(Path("pictures") / split, {"ant": 6, "bee": 6})
    damaged = []
    for split, keep in (("train", 0), ("val", 1), ("test", 2)):
        paths = write_damaged(Path("pictures") / split / "bee")
        damaged.append(paths[keep])
        for path in paths:
            if path != paths[keep]:
                path.unlink()
    result = train(*SMALL, *PICTURES, "data.on_error=skip", "data.batch_size=6")
    assert result.exit_code == 0, result.output
    assert "12 train, 12 val, 12 test" in result.output
    end = result.output[result.output.index("3 file(s) skipped") :]
    assert end.count("cannot be read as a picture") == 3
    for path in damaged:
        assert str(path.absolute()) in end
        assert any(str(path.absolute()) in line for line in result.record["skipped"])
    (Path("pictures") / "clean").mkdir()
    for path in damaged:
        path.unlink()
    clean = train(*SMALL, *PICTURES, "data.on_error=skip", "data.batch_size=6")
    assert clean.metrics == result.metrics  # as if the files were not there
    assert "file(s) skipped" not in clean.output
    assert clean.record["skipped"] == []


def test_img_04_nothing_readable_left_is_an_error(train: Callable, workspace: Path) -> None:
    for split in ("train", "val", "test"):
        write_pictures(Path("pictures") / split, {"ant": 4})
        write_damaged(Path("pictures") / split / "bee")
    result = train(*SMALL, *PICTURES, "data.on_error=skip")
    assert result.exit_code == 1
    assert "no training picture of class bee can be read" in result.output
    assert str((Path("pictures") / "train" / "bee").absolute()) in result.output


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # what Pillow says of damaged EXIF data
def test_img_04_any_truncation_of_any_format_is_named(workspace: Path) -> None:
    image = upright((12, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        whole = Path(f"whole.{suffix}")
        image.save(whole, **({} if suffix in ("gif", "bmp", "ppm") else {"exif": exif}))
        content = whole.read_bytes()
        part = Path(f"part.{suffix}")
        for length in range(0, len(content) // 2, max(1, len(content) // 40)):
            part.write_bytes(content[:length])
            with pytest.raises(DataError) as caught:
                load_image(part, 3, 8, 255)
            assert str(part.absolute()) in str(caught.value)


# ---- IMG-05: class numbers --------------------------------------------------------------------------------------


def test_img_05_class_numbers_come_from_training_for_all_splits(train: Callable, workspace: Path) -> None:
    for split, names in (("train", ("ant", "cat", "dog")), ("val", ("cat", "dog")), ("test", ("dog",))):
        write_pictures(Path("pictures") / split, dict.fromkeys(names, 4))
    (Path("pictures") / "val" / "aaa").mkdir()  # a folder without pictures is no class
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 0, result.output
    checkpoint = load_checkpoint(result.folder)
    assert checkpoint.data_state["facts"]["class_names"] == ["ant", "cat", "dog"]
    _, data = restore(checkpoint)
    data.setup("test")
    assert data.splits["val"]["label"].tolist() == [1] * 4 + [2] * 4
    assert data.splits["test"]["label"].tolist() == [2] * 4
    # Names in predictions, also where the folder at hand would give other numbers
    predicted = predict_file(result.folder, Path("pictures/test"))["prediction"].to_list()
    right = np.mean([name == "dog" for name in predicted])
    assert evaluate_run(result.folder)["test/accuracy"] == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("split", ["val", "test"])
def test_img_05_class_that_training_lacks_is_named(train: Callable, workspace: Path, split: str) -> None:
    for name in ("train", "val", "test"):
        write_pictures(Path("pictures") / name, {"ant": 4, "cat": 4, **({"zebra": 3} if name == split else {})})
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 1
    assert f"the {split} split has classes that training does not have: zebra (3 pictures)" in result.output
    assert "Training classes: ant, cat" in result.output


def test_img_05_classes_that_appear_after_training_are_refused(train: Callable, workspace: Path) -> None:
    for name in ("train", "val", "test"):
        write_pictures(Path("pictures") / name, {"bee": 4, "cat": 4})
    result = train(*SMALL, *PICTURES)
    assert result.exit_code == 0, result.output
    # The folder is read again by `evaluate`; a new first class shifts all numbers
    write_pictures(Path("pictures") / "train", {"ant": 4})
    with pytest.raises(DataError, match="class_names"):
        evaluate_run(result.folder)
