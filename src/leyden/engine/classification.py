"""Classification into one of several classes: loss, metrics, baseline; domains add what their input is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.schedule import Schedule
from leyden.engine.task import Task
from leyden.errors import ConfigError


class ClassificationTask(Task):
    """Cross-entropy over classes; accuracy and macro-F1.

    Macro-F1 is the mean over the classes that occur among the targets or the predictions: a class that is in
    neither does not lower it.

    Where a training batch has `label_probability` (B, num_classes), e.g. by Mixup, the loss is the cross-entropy with
    these, and metrics of training compare with `label`, the class of the larger share.

    Args:
        net: gives logits (B, num_classes) for `batch[input_key]`.
        optim: called with the named parameters, gives the optimiser.
        schedule: factor of the learning rate over the steps.
        num_classes: taken from the data.
        class_names: taken from the data; one name per class index.
        label_smoothing: share of the target probability that is spread over all classes, in every phase,
            so that the losses of training and validation compare.
        seed: of randomness inside the step.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "macro_f1")
    takes_mixed_labels: ClassVar[bool] = True

    def __init__(
        self,
        net: nn.Module,
        optim: Callable[..., torch.optim.Optimizer],
        schedule: Schedule,
        num_classes: Annotated[int, Ge(2)],
        class_names: Sequence[str],
        label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0,
        seed: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__(net, optim, schedule, seed)
        self.num_classes = num_classes
        self.class_names = list(class_names)
        self.label_smoothing = label_smoothing
        self.confusion_matrix = MulticlassConfusionMatrix(num_classes)

    def build_metrics(self) -> MetricCollection:
        return MetricCollection(
            {
                # Labels out of range are found by the loss before
                "accuracy": MulticlassAccuracy(self.num_classes, average="micro", validate_args=False),
                "macro_f1": MulticlassF1Score(self.num_classes, average="macro", validate_args=False),
            }
        )

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, label = self(batch), batch["label"]
        expected = (len(label), self.num_classes)
        if tuple(logits.shape) != expected:
            raise ConfigError(
                f"`model.net` gives an output of shape {tuple(logits.shape)} for {len(label)} rows, but the data has "
                f"{self.num_classes} classes, so it must be {expected}. Give the network {self.num_classes} outputs, "
                f"e.g. +model.net.num_classes={self.num_classes}."
            )
        target = batch["label_probability"].to(logits.dtype) if "label_probability" in batch else label
        return F.cross_entropy(logits, target, label_smoothing=self.label_smoothing), logits

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.argmax(dim=1), batch["label"]

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        if len(batch["label"]):
            loss, logits = self.compute_loss(batch)
            self._update("test", loss, logits, batch)
            self.confusion_matrix.update(logits.argmax(dim=1), batch["label"])

    def baseline_outputs(self, data: DataModule, num_rows: int) -> tuple[str, Tensor]:
        majority = int(torch.bincount(data.splits["train"]["label"].long()).argmax())
        outputs = F.one_hot(torch.full((num_rows,), majority), self.num_classes).float()
        return f"always '{self.class_names[majority]}'", outputs

    def draw(self) -> dict[str, Figure]:
        from sklearn.metrics import ConfusionMatrixDisplay

        counts = self.confusion_matrix.compute().cpu().numpy()
        size = max(4.0, 0.45 * self.num_classes)
        figure = Figure(figsize=(size, size), layout="constrained")
        display = ConfusionMatrixDisplay(counts, display_labels=self.class_names)
        display.plot(ax=figure.add_subplot(), cmap="Blues", colorbar=False, xticks_rotation="vertical")
        display.ax_.set(xlabel="predicted", ylabel="true", title="Test: confusion matrix")
        return {"confusion_matrix": figure}

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        probability, index = outputs.softmax(dim=1).max(dim=1)
        return {
            "prediction": [self.class_names[i] for i in index.tolist()],
            "probability": probability.tolist(),
        }
