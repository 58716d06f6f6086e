"""Classification into one of several classes: loss, metrics, baseline; domains add what their input is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.schedule import Schedule
from leyden.engine.task import Task
from leyden.errors import ConfigError


class ClassCounts(MulticlassConfusionMatrix):
    """How often each class (row) was taken for each class (column).

    torchmetrics' own update compares each prediction with each cell where algorithms have to be deterministic, which
    costs more than the training (1.9.0); counting whole numbers gives the same in any order.
    """

    confmat: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, validate_args=False)  # labels out of range are found by the loss before

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Counts logits (B, num_classes) for targets (B,)."""
        cells = target * self.num_classes + preds.argmax(dim=1)
        self.confmat += torch.bincount(cells, minlength=self.num_classes**2).view_as(self.confmat)


class Accuracy(ClassCounts):
    """The share of right predictions."""

    def compute(self) -> Tensor:
        """A scalar; NaN where there are no rows."""
        return self.confmat.diag().sum() / self.confmat.sum()


class MacroF1(ClassCounts):
    """The mean F1 of the classes that occur among the targets or the predictions."""

    def compute(self) -> Tensor:
        """A scalar; NaN where there are no rows."""
        occurrences = self.confmat.sum(0) + self.confmat.sum(1)
        f1 = 2 * self.confmat.diag() / occurrences
        return f1[occurrences > 0].mean()


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
        self.confusion_matrix = ClassCounts(num_classes)

    def build_metrics(self) -> MetricCollection:
        metrics: dict[str, Metric | MetricCollection] = {
            "accuracy": Accuracy(self.num_classes),
            "macro_f1": MacroF1(self.num_classes),
        }
        return MetricCollection(metrics, compute_groups=[["accuracy", "macro_f1"]])  # which count once

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
        return outputs, batch["label"]

    def keep_tested(self, outputs: Tensor, batch: Batch) -> None:
        self.confusion_matrix.update(outputs, batch["label"])

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
