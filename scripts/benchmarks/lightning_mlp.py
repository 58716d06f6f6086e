"""Plain Lightning as its tutorials show it: per-sample transforms in a DataLoader, logging at every step.

Run: python -m benchmarks.lightning_mlp ARRAYS OUT [--num-workers N] [--epochs N] [--limit-batches N]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms

from benchmarks.arguments import array_parser
from benchmarks.timer import EpochTimer
from benchmarks.works import WARMUP_EPOCHS


class Clothes(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's data sets hand them out: one picture and its transforms at a time."""

    def __init__(self, path: str) -> None:
        with np.load(path) as found:
            self.images, self.labels = found["image"], found["label"].tolist()
            mean, std = float(found["mean"]), float(found["std"])
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image: Tensor = self.transform(Image.fromarray(self.images[index]))
        return image, self.labels[index]


class Classifier(LightningModule):
    """MLP 784-128-10 with loss and accuracy logged per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, label = batch
        logits = self.net(image)
        loss = F.cross_entropy(logits, label)
        self.accuracy(logits, label)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Measures `Trainer.fit` and writes the result."""
    parser = array_parser(__doc__)
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=WARMUP_EPOCHS + args.epochs,
        limit_train_batches=args.limit_batches,
        logger=TensorBoardLogger(Path.cwd()),
        callbacks=[ModelCheckpoint(), EpochTimer(args.out, WARMUP_EPOCHS)],
    )
    loader = DataLoader(Clothes(args.arrays), args.batch_size, shuffle=True, num_workers=args.num_workers)
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
