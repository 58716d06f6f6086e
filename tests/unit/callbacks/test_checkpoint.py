"""best.ckpt and last.ckpt: which epoch each holds, and what is in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import leyden
from leyden.callbacks.checkpoint import Checkpoint
from leyden.engine.checkpoint import CheckpointWriter

pytestmark = [
    # Lightning 2.6 with torch 2.12 and later
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*"),
]


class Scripted(LightningModule):
    """Logs given values as val/score and train/score, one an epoch; its weight counts the steps."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def on_train_epoch_end(self) -> None:
        self.log("train/score", self.scores[self.current_epoch])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", self.scores[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)  # the weight is minus the number of steps


def run(
    folder: Path,
    callback: Checkpoint,
    module: Scripted,
    num_epochs: int,
    with_val: bool = True,
    num_batches: int = 1,
) -> None:
    trainer = Trainer(
        max_epochs=num_epochs,
        accelerator="cpu",
        callbacks=[callback],
        plugins=[CheckpointWriter()],
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2 if num_batches > 1 else None,
    )
    loader = DataLoader(torch.zeros(num_batches, 1))
    trainer.fit(module, loader, DataLoader(torch.zeros(1, 1)) if with_val else None)


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def steps(path: Path) -> int:
    return -int(load(path)["state_dict"]["weight"])


@pytest.mark.parametrize(("interval_s", "before_last"), [(0, 3), (1000, 1)])
@pytest.mark.parametrize(
    ("monitor", "mode", "best"), [("val/score", "max", 2), ("val/score", "min", 3), ("train/score", "max", 2)]
)
def test_best_and_last(tmp_path: Path, monitor: str, mode: Any, best: int, interval_s: float, before_last: int) -> None:
    callback = Checkpoint(monitor, mode, min_interval_s=interval_s)
    run(tmp_path, callback, Scripted([0.5, 0.9, 0.1, 0.3]), num_epochs=4)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last-1.ckpt", "last.ckpt"]
    assert steps(folder / "last-1.ckpt") == before_last
    assert steps(folder / "best.ckpt") == best
    assert steps(folder / "last.ckpt") == 4
    assert callback.path_to_test == folder / "best.ckpt"


def test_short_epochs_share_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of 4 s by the clock, of which each second one is the best so far: written at 4, 16 (4 + 12), 24 s."""
    written = []

    class Timed(Scripted):
        def on_train_epoch_end(self) -> None:
            clock[0] += 4.0

    def note(checkpoint: dict[str, Any], path: Path, keep: int = 1, also: Path | None = None) -> None:
        written.append((-int(checkpoint["state_dict"]["weight"]), path.name, also and also.name))

    clock = [0.0]
    monkeypatch.setattr("leyden.callbacks.checkpoint.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("leyden.engine.checkpoint.write_checkpoint", note)
    callback = Checkpoint("val/score", "max", min_interval_s=10.0)
    run(tmp_path, callback, Timed([0.1, 0.2, 0.1, 0.1, 0.4, 0.5]), num_epochs=6)
    best, last = "best.ckpt", "last.ckpt"
    assert written == [(1, last, best), (2, best, None), (4, last, None), (6, last, best)]


def test_best_may_lie_within_an_epoch(tmp_path: Path) -> None:
    class Within(Scripted):
        def on_train_epoch_end(self) -> None: ...

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/score", self.scores.pop(0))

    # Four batches an epoch, validated after two of them: steps 2, 4, 6, 8
    run(tmp_path, Checkpoint("val/score", "max"), Within([0.1, 0.2, 0.9, 0.3]), num_epochs=2, num_batches=4)
    assert steps(tmp_path / "checkpoints" / "best.ckpt") == 6
    assert steps(tmp_path / "checkpoints" / "last.ckpt") == 8


def test_without_a_metric_the_last_state_is_kept(tmp_path: Path) -> None:
    callback = Checkpoint(None, "min")
    run(tmp_path, callback, Scripted([0.5, 0.9, 0.1]), num_epochs=3, with_val=False)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last-1.ckpt", "last.ckpt"]
    assert steps(folder / "last.ckpt") == 3
    assert callback.path_to_test == folder / "last.ckpt"


def test_file_has_plain_values_with_config_version_and_metrics(tmp_path: Path) -> None:
    callback = Checkpoint("val/score", "max")
    callback.config = {"seed": 0, "optim": {"betas": [0.9, 0.999], "note": None}}
    run(tmp_path, callback, Scripted([0.25, 0.5, 0.125]), num_epochs=3)
    best = load(tmp_path / "checkpoints" / "best.ckpt")["leyden"]
    assert best["version"] == leyden.__version__
    assert best["config"] == callback.config
    assert best["metrics"]["val/score"] == 0.5
    assert all(type(value) is float for value in best["metrics"].values())
    assert load(tmp_path / "checkpoints" / "last.ckpt")["leyden"]["metrics"]["val/score"] == 0.125
