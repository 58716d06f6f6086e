"""Image files as uint8 tensors of one size and number of channels, whatever their mode and orientation."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.progress import track
from torch import Tensor

from leyden.errors import DataError

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})


def load_image(path: Path, in_channels: int, image_size: int, background: int) -> Tensor:
    """Reads one picture: turned upright by its EXIF orientation, cropped to a centred square, resized.

    Palettes become colours; transparency is put on a grey of value `background` (255 is white); 16 and 32 bit
    integers (0..65535) are scaled to 0..255; floating-point pictures are taken as 0..255.

    Shape:
        output (in_channels, image_size, image_size) uint8.

    Raises:
        DataError: when the file is not a readable picture, with its full path.
    """
    try:
        with Image.open(path) as opened:
            image = to_channels(ImageOps.exif_transpose(opened), in_channels, background)
    except Exception as err:  # decoders raise whatever their code meets: OSError, SyntaxError, struct.error, ...
        raise DataError(f"{path.absolute()} cannot be read as a picture: {str(err) or type(err).__name__}.") from err
    fitted = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(fitted, dtype=np.uint8).reshape(image_size, image_size, in_channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def to_channels(image: Image.Image, in_channels: int, background: int) -> Image.Image:
    """A picture of any mode as 8-bit grey (1 channel) or RGB (3 channels)."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64) / (1 if image.mode == "F" else 257)
        image = Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "RGBA":
        paper = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(paper, image)
    return image.convert("L" if in_channels == 1 else "RGB")


def load_images(
    paths: Sequence[Path],
    in_channels: int,
    image_size: int,
    background: int,
    on_error: Literal["raise", "skip"],
) -> tuple[Tensor, list[int], list[str]]:
    """Reads many pictures by threads (decoding releases the interpreter's lock).

    Returns:
        images (N, in_channels, image_size, image_size) uint8, the positions in `paths` of those that were read, and
        a message per picture that was not.

    Raises:
        DataError: for the first unreadable picture, with on_error "raise".
    """

    def read(path: Path) -> Tensor | DataError:
        try:
            return load_image(path, in_channels, image_size, background)
        except DataError as err:
            return err

    images = torch.empty(len(paths), in_channels, image_size, image_size, dtype=torch.uint8)
    kept: list[int] = []
    skipped: list[str] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(read, paths)
        shown = track(results, "Reading pictures", total=len(paths), transient=True, disable=len(paths) < 500)
        for position, result in enumerate(shown):
            if isinstance(result, Tensor):
                images[len(kept)] = result
                kept.append(position)
            elif on_error == "raise":
                pool.shutdown(wait=False, cancel_futures=True)
                raise DataError(f"{result} Remove the file, or use data.on_error=skip to leave such files out.")
            else:
                skipped.append(str(result))
    return images[: len(kept)].clone() if skipped else images, kept, skipped
