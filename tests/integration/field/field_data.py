"""Small data sets in the shapes that the field cases need, and the overrides that go with them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Runs that last about a second: one process, few epochs, a small network.
SMALL = ("hardware=cpu", "hardware.num_threads=1", "trainer.max_epochs=1", "logger=null")
TABLE = ("data=table", "data.path=table.csv", "data.target=y", "model.net.hidden_dim=8", "schedule=constant")
PICTURES = (
    "experiment=vision_fashion_mnist_mlp",
    "data=image_folder",
    "data.path=pictures",
    "data.image_size=8",
    "data.batch_size=8",
    "model.net.hidden_dims=[8]",
)
TEXTS = (
    "experiment=nlp",
    "data=text_table",
    "data.path=texts.csv",
    "data.text=text",
    "data.label=label",
    "data.batch_size=8",
    "model.net.num_buckets=512",
    "model.net.embed_dim=8",
)


def write_csv(path: Path | str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A CSV file with quotes where they are needed."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def table_rows(num_rows: int) -> list[list[float]]:
    """Rows x1, x2, y with y = 3 x1 - 2 x2 + 1 and no two rows alike."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(num_rows, 2)).round(4)
    return [[float(a), float(b), round(float(3 * a - 2 * b + 1), 6)] for a, b in inputs]


def write_table(path: Path | str, num_rows: int) -> None:
    """A table of `table_rows`."""
    write_csv(path, ("x1", "x2", "y"), table_rows(num_rows))


def text_rows(num_rows: int) -> list[list[str]]:
    """Different texts with the labels 'down' (of letters a to e) and 'up' (of letters v to z)."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(num_rows):
        label, letters = (("down", "abcde"), ("up", "vwxyz"))[index % 2]
        rows.append(["".join(generator.choice(list(letters), 8)) + f" {index}", label])
    return rows


def write_pictures(folder: Path | str, counts: dict[str, int], size: int = 8) -> None:
    """`folder/CLASS/N.png` with noise on a grey level of the class; no two pictures alike."""
    for position, (name, count) in enumerate(sorted(counts.items())):
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(len(str(folder)) * 100 + position)
        # The level depends on the class's name, not on its position, so that splits agree
        level = 30 + 17 * (ord(name[0]) - ord("a")) % 190
        for index in range(count):
            pixels = level + generator.integers(0, 30, size=(size, size, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(Path(folder) / name / f"{index}.png")
