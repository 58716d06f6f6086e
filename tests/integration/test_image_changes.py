"""Runs with every filter and augmentation: trained, evaluated and predicted from the checkpoint alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leyden.runs.evaluate import evaluate_run
from leyden.runs.predict import predict_file
from leyden.runs.restore import load_checkpoint, restore

SHORT = ("experiment=vision", "trainer.max_epochs=2", "hardware=cpu", "hardware.num_threads=1", "logger=null")
FILTERS = (
    "+data.filters.blur._target_=leyden.data.filters.GaussianBlur",
    "+data.filters.blur.sigma=0.5",
    "+data.filters.sharp._target_=leyden.data.filters.Sharpen",
    "+data.filters.sharp.amount=1.0",
    "+data.filters.edges._target_=leyden.data.filters.SobelEdges",
)
AUGMENT = (  # beside the experiment's RandomAffine
    "+data.augment.blur._target_=leyden.data.filters.GaussianBlur",
    "+data.augment.blur.sigma=[0.3,1]",
    "+data.augment.blur.probability=0.5",
    "+data.augment.crop._target_=leyden.data.batch_transforms.RandomCrop",
    "+data.augment.crop.padding=1",
    "+data.augment.flip._target_=leyden.data.batch_transforms.RandomFlip",
    "+data.augment.cutout._target_=leyden.data.batch_transforms.Cutout",
    "+data.augment.cutout.size=2",
    "+data.augment.noise._target_=leyden.data.batch_transforms.GaussianNoise",
    "+data.augment.noise.std=0.05",
    "+data.augment.mixup._target_=leyden.data.mixup.Mixup",
    "+data.augment.mixup.alpha=0.4",
)
MIXUP = AUGMENT[-2:]
NO_GROUPS = ("experiment=vision_fashion_mnist_mlp", "data=digits", "model.net.hidden_dims=[16]", *SHORT[1:])


def test_run_with_every_filter_and_augmentation(train: Callable, workspace: Path) -> None:
    result = train(*SHORT, *FILTERS, *AUGMENT)
    assert result.exit_code == 0, result.output
    assert all(math.isfinite(value) for value in result.metrics.values())
    again = evaluate_run(result.folder)
    assert again == pytest.approx({name: result.metrics[name] for name in again}, rel=1e-5)
    assert evaluate_run(result.folder, batch_size=7) == pytest.approx(again, rel=1e-5)

    # Predictions for files are those of the network on filtered pixels, by hand
    checkpoint = load_checkpoint(result.folder)
    task, data = restore(checkpoint)
    assert [type(change).__name__ for change in data.filters] == ["GaussianBlur", "Sharpen", "SobelEdges"]
    assert len(data.augment) == 7
    data.setup()
    images = data.splits["test"]["image"][:9]
    (workspace / "new").mkdir()
    for row, image in enumerate(images[:, 0].numpy()):
        Image.fromarray(image.astype(np.uint8)).save(workspace / "new" / f"{row}.png")
    table = predict_file(result.folder, Path("new"))
    filtered = images.float() * (1 / 255)
    for change in data.filters:
        filtered = change(filtered)
    fitted = checkpoint.data_state["fitted"]
    with torch.no_grad():
        probability, index = task.net((filtered - fitted["mean"][0]) / fitted["std"][0]).softmax(dim=1).max(dim=1)
    assert table["prediction"].to_list() == [str(i) for i in index.tolist()]
    assert table["probability"].to_list() == pytest.approx(probability.tolist(), rel=1e-4)


def test_equal_seeds_give_equal_runs_and_micro_batches_change_nothing(train: Callable) -> None:
    runs = [
        train(*NO_GROUPS, *FILTERS, *AUGMENT, *more).metrics
        for more in ((), (), ("seed=1",), ("engine.micro_batch_size=13",))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[3] == pytest.approx(runs[0], rel=1e-3)


def test_filters_change_the_run_and_the_checkpoint_keeps_their_statistics(train: Callable) -> None:
    plain, filtered = train(*NO_GROUPS), train(*NO_GROUPS, *FILTERS)
    assert plain.metrics["test/loss"] != filtered.metrics["test/loss"]
    means = [load_checkpoint(run.folder).data_state["fitted"]["mean"] for run in (plain, filtered)]
    assert means[0] != means[1]


def test_mixup_bounds_the_loss_of_training_by_the_entropy_of_its_labels(train: Callable) -> None:
    # A share uniform in 0 .. 1 has an entropy of 1/2 in the mean, and 9 of 10 partners are of another class: 0.45
    long = (*NO_GROUPS, "model.net.hidden_dims=[64]", "trainer.max_epochs=30", "optim.lr=0.01")
    mixup = (*MIXUP[:1], "+data.augment.mixup.alpha=1.0")
    plain, mixed, smoothed = (
        train(*long, *more).metrics for more in ((), mixup, (*mixup, "model.label_smoothing=0.1"))
    )
    assert plain["train/loss"] < 0.1
    assert mixed["train/loss"] > 0.44
    assert smoothed["train/loss"] > mixed["train/loss"] + 0.1
    assert mixed["test/accuracy"] == pytest.approx(plain["test/accuracy"], abs=0.05)
    assert mixed["train/accuracy"] < plain["train/accuracy"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("+data.filters.f._target_=leyden.data.batch_transforms.RandomFlip",),
            "`data.filters.f` (RandomFlip) is random",
        ),
        (("+data.filters.m._target_=leyden.data.mixup.Mixup", "+data.filters.m.alpha=1.0"), "(Mixup) is random"),
        (("+data.augment.e._target_=leyden.data.filters.SobelEdges",), "`data.augment.e` (SobelEdges) takes no random"),
        (
            ("+data.filters.b._target_=leyden.data.filters.GaussianBlur", "+data.filters.b.sigma=[1,2]"),
            "Or give it one sigma and probability 1.",
        ),
        (
            ("+data.filters.b._target_=leyden.data.filters.GaussianBlur", "+data.filters.b.sigma=0"),
            "`data.filters.b.sigma` must be greater than 0",
        ),
        (
            ("+data.augment.b._target_=leyden.data.filters.GaussianBlur", "+data.augment.b.sigma=[2,1]"),
            "`data.augment.b.sigma` is [2, 1], but a range goes from the smaller to the larger value.",
        ),
    ],
)
def test_wrong_choices_are_explained_before_training(train: Callable, arguments: tuple[str, ...], words: str) -> None:
    result = train(*SHORT, *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output
    assert not list(Path("outputs").rglob("*.ckpt"))
