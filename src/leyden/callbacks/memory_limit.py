"""`hardware.memory_fraction`: how much of a CUDA GPU's memory torch may take."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class MemoryLimit(Callback):
    """Limits torch's allocator on the device of this process, while the trainer runs.

    It counts what torch takes for tensors and keeps for the next ones, not CUDA's own few hundred MiB.

    Args:
        fraction: of the device's memory, above 0 and at most 1.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    @classmethod
    def of(cls, fraction: float | None) -> list[MemoryLimit]:
        """The callback that a setting asks for, none for null."""
        return [] if fraction is None else [cls(fraction)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.cuda.set_per_process_memory_fraction(self.fraction, trainer.strategy.root_device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, trainer.strategy.root_device)
