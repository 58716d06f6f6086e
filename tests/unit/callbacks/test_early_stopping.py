"""The stop after `patience` validations without an improvement, and the words that go with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from leyden.callbacks.early_stopping import EarlyStopping

pytestmark = [
    # Lightning 2.6 with torch 2.12 and later
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


class Scripted(LightningModule):
    """Logs one given value per validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = list(scores)
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", self.scores.pop(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def run(callback: EarlyStopping, scores: list[float], num_batches: int = 1, **changes: Any) -> Trainer:
    trainer = Trainer(
        max_epochs=len(scores),
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **changes,
    )
    loader = torch.utils.data.DataLoader(torch.zeros(num_batches, 1))
    trainer.fit(Scripted(scores), loader, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    return trainer


@pytest.mark.parametrize(
    ("mode", "patience", "min_delta", "scores", "num_epochs"),
    [
        ("max", 2, 0.0, [0.1, 0.5, 0.4, 0.5, 0.9], 4),  # 0.4 and 0.5 do not improve on 0.5
        ("min", 1, 0.0, [0.9, 0.8, 0.85, 0.1], 3),
        ("max", 1, 0.1, [0.1, 0.15, 0.9], 2),  # 0.05 is below the smallest change
        ("max", 2, 0.0, [0.1, 0.2, 0.3], 3),  # never stops
    ],
)
def test_stop(mode: Any, patience: int, min_delta: float, scores: list[float], num_epochs: int) -> None:
    trainer = run(EarlyStopping("val/score", mode, patience, min_delta), scores)
    assert trainer.current_epoch == num_epochs


def test_stop_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "leyden"):
        run(EarlyStopping("val/score", "max", patience=2), [0.1, 0.5, 0.4, 0.5, 0.9])
    said = [record.message for record in caplog.records if record.name.startswith("leyden")]
    assert said == ["Stopped early after epoch 4: val/score did not improve on 0.5 for 2 validations."]


def test_stop_within_the_first_epoch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "leyden"):
        run(EarlyStopping("val/score", "max", patience=1), [0.5] * 9, num_batches=8, val_check_interval=2)
    assert "Stopped early after epoch 1: val/score did not improve on 0.5 for 1 validations." in caplog.text


def test_metric_that_is_not_finite_stops_for_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    trainer = run(EarlyStopping("val/score", "max", patience=2), [0.5, float("nan"), 0.9, 0.9])
    assert trainer.current_epoch == 2
    said = [record.message for record in caplog.records if record.name.startswith("leyden")]
    assert said == ["Stopped early after epoch 2: val/score is not finite."]


def test_full_training_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "leyden"):
        run(EarlyStopping("val/score", "max", patience=2), [0.1, 0.2, 0.3])
    assert "Stopped early" not in caplog.text


def test_metric_that_is_not_logged_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="val/other"):
        run(EarlyStopping("val/other", "max"), [0.1])
