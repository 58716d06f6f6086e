"""Draws docs/pictures/augmentations.png: pictures of Fashion-MNIST and what each filter and augmentation makes of them.

Needs Fashion-MNIST, in data/ or from Debian's package dataset-fashion-mnist. Run: python scripts/draw_augmentations.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from leyden.data.batch_transforms import Cutout, GaussianNoise, RandomAffine, RandomCrop, RandomFlip
from leyden.data.filters import GaussianBlur, Sharpen, SobelEdges
from leyden.data.image_changes import Augmentation, Filter, apply_filters, augment_batch
from leyden.data.mixup import Mixup
from leyden.vision.data import TorchvisionData

CLASSES = ["Ankle boot", "Pullover", "Bag", "Dress", "Sandal"]  # the first picture of each
SEED = 2379  # one whose draws show what each change does
FILTERS: dict[str, Filter] = {
    "GaussianBlur\nsigma=1": GaussianBlur(1.0),
    "SobelEdges": SobelEdges(),
    "Sharpen\namount=2": Sharpen(2.0),
}
AUGMENTATIONS: dict[str, Augmentation] = {
    "GaussianBlur\nsigma=[0.3,2]": GaussianBlur((0.3, 2.0)),
    "RandomAffine\ndegrees=15 ...": RandomAffine(15.0, 0.1, 0.15, 10.0),
    "RandomCrop\npadding=4": RandomCrop(4),
    "RandomFlip": RandomFlip(),
    "Cutout\nsize=10": Cutout(10),
    "GaussianNoise\nstd=0.15": GaussianNoise(0.15),
    "Mixup\nalpha=1": Mixup(1.0),
}


def draw(columns: dict[str, Tensor], num_filters: int) -> Figure:
    """One column of pictures a change, with its name above."""
    num_rows = len(CLASSES)
    figure = Figure(figsize=(1.15 * len(columns), 1.04 * num_rows + 0.62), dpi=110)
    axes = figure.subplots(num_rows, len(columns), squeeze=False)
    figure.subplots_adjust(left=0.005, right=0.995, bottom=0.01, top=0.89, wspace=0.05, hspace=0.05)
    for column, (name, images) in enumerate(columns.items()):
        for row in range(num_rows):
            axes[row, column].imshow(images[row, 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes[row, column].set_axis_off()
        axes[0, column].set_title(name, fontsize=7.5, pad=4)
    for first, last, label in (
        (1, num_filters, "filters: the same for all images"),
        (num_filters + 1, len(columns) - 1, "augmentations: by a draw for each training image"),
    ):
        left, right = axes[0, first].get_position().x0, axes[0, last].get_position().x1
        figure.text((left + right) / 2, 0.98, label, ha="center", va="center", fontsize=9, weight="bold")
        figure.add_artist(Line2D([left, right], [0.962, 0.962], color="black", linewidth=0.8))
    return figure


def main() -> None:
    """Draws the picture."""
    data = TorchvisionData("FashionMNIST", "data")
    data.prepare_data()
    data.setup()
    train = data.splits["train"]
    chosen = [int((train["label"] == data.facts["class_names"].index(name)).int().argmax()) for name in CLASSES]
    rows = {name: tensor[chosen] for name, tensor in train.items()}
    rows["image"] = rows["image"].float() / 255
    columns = {"original": rows["image"]}
    columns |= {name: apply_filters(rows["image"], [change]) for name, change in FILTERS.items()}
    for name, change in AUGMENTATIONS.items():
        generator = torch.Generator().manual_seed(SEED)
        columns[name] = augment_batch(rows, [change], generator, data.facts["num_classes"])["image"]
    path = Path(__file__).parents[1] / "docs" / "pictures" / "augmentations.png"
    draw(columns, len(FILTERS)).savefig(path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
