"""Classification: scikit-learn's metrics for images and texts, smoothing, errors of shape."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import confusion_matrix
from task_contract import CONSTANT, SGD, ClassificationContract
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from leyden.engine.classification import ClassificationTask
from leyden.engine.task import Task
from leyden.errors import ConfigError
from leyden.nlp.nets import NgramBag
from leyden.nlp.task import TextTask
from leyden.vision.nets import MLP, ResNet
from leyden.vision.task import VisionTask

NAMES = ["cat", "dog", "fox"]


class TestVisionTask(ClassificationContract):
    def build_task(self) -> Task:
        return VisionTask(ResNet(3, in_channels=1, widths=(8,)), SGD, CONSTANT, num_classes=3, class_names=NAMES)

    def draw_inputs(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, 1, 6, 6)


class TestTextTask(ClassificationContract):
    def build_task(self) -> Task:
        net = NgramBag(3, vocab_size=6, num_buckets=64, embed_dim=8)
        return TextTask(net, SGD, CONSTANT, num_classes=3, class_names=NAMES)

    def draw_inputs(self, num_rows: int) -> Tensor:
        return torch.randint(1, 6, (num_rows, 9))


class TestPlainTask(ClassificationContract):
    def build_task(self) -> Task:
        return ClassificationTask(nn.Linear(4, 3), SGD, CONSTANT, num_classes=3, class_names=NAMES, label_smoothing=0.1)

    def draw_inputs(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, 4)


def build(num_classes: int = 3, label_smoothing: float = 0.0, net: nn.Module | None = None) -> ClassificationTask:
    names = [f"class {index}" for index in range(num_classes)]
    task = ClassificationTask(
        net or nn.Identity(), SGD, CONSTANT, num_classes=num_classes, class_names=names, label_smoothing=label_smoothing
    )
    task.setup()
    return task


def test_smoothing_counts_in_every_phase() -> None:
    torch.manual_seed(0)
    batch = {"input": torch.randn(5, 3), "label": torch.tensor([0, 1, 2, 1, 0])}
    task = build(label_smoothing=0.3)
    # The target is 0.7 on the class and 0.3 spread over all three.
    target = 0.7 * F.one_hot(batch["label"], 3) + 0.1
    smoothed = -(target * batch["input"].log_softmax(dim=1)).sum(dim=1).mean()
    assert float(task.train().compute_loss(batch)[0]) == pytest.approx(float(smoothed), rel=1e-5)
    assert float(task.eval().compute_loss(batch)[0]) == pytest.approx(float(smoothed), rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_loss_of_mixed_labels_is_the_cross_entropy_by_their_shares(label_smoothing: float) -> None:
    torch.manual_seed(0)
    share = torch.tensor([0.9, 0.5, 0.2])[:, None]
    one, other = F.one_hot(torch.tensor([0, 1, 2]), 3), F.one_hot(torch.tensor([2, 0, 2]), 3)
    probability = share * one + (1 - share) * other
    batch = {"input": torch.randn(3, 3), "label": torch.tensor([0, 1, 2]), "label_probability": probability}
    loss, _ = build(label_smoothing=label_smoothing).compute_loss(batch)
    target = (1 - label_smoothing) * probability + label_smoothing / 3
    assert float(loss) == pytest.approx(float(-(target * batch["input"].log_softmax(1)).sum(1).mean()), rel=1e-5)


def test_whole_labels_as_probabilities_give_the_same_loss_in_any_precision() -> None:
    torch.manual_seed(0)
    batch = {"input": torch.randn(5, 3), "label": torch.tensor([0, 1, 2, 1, 0])}
    task = build(label_smoothing=0.1)
    expected = float(task.compute_loss(batch)[0])
    batch["label_probability"] = F.one_hot(batch["label"], 3).float()
    assert float(task.compute_loss(batch)[0]) == pytest.approx(expected, rel=1e-5)
    batch["input"] = batch["input"].double()
    assert float(task.compute_loss(batch)[0]) == pytest.approx(expected, rel=1e-5)


def test_metrics_of_mixed_labels_compare_with_the_label() -> None:
    batch = {"input": torch.eye(3), "label": torch.tensor([0, 1, 1]), "label_probability": torch.full((3, 3), 1 / 3)}
    outputs, target = build().metric_inputs(batch["input"], batch)
    assert outputs.argmax(dim=1).tolist() == [0, 1, 2]
    assert target.tolist() == [0, 1, 1]


def test_macro_f1_leaves_out_classes_that_do_not_occur() -> None:
    task = build(num_classes=10)
    batch = {"input": F.one_hot(torch.tensor([0, 0, 1, 1]), 10).float(), "label": torch.tensor([0, 1, 1, 1])}
    task.validation_step(batch, 0)
    # Class 0: precision 1/2, recall 1, F1 2/3. Class 1: precision 1, recall 2/3, F1 4/5. The other eight: nothing.
    assert task.compute_phase("val")["val/macro_f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)


@pytest.mark.parametrize("num_rows", [1, 7, 5000])
def test_metrics_are_torchmetrics_own(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, 20, generator=generator)
    label = torch.randint(0, 15, (num_rows,), generator=generator)  # five classes are among the predictions at most
    logits[:, 19] = -10  # and one is in neither
    metrics = ClassificationTask(nn.Identity(), SGD, CONSTANT, 20, list("abcdefghijklmnopqrst")).build_metrics()
    for start in range(0, num_rows, 1000):
        metrics.update(logits[start : start + 1000], label[start : start + 1000])
    computed = metrics.compute()
    expected = {
        "accuracy": MulticlassAccuracy(20, average="micro")(logits, label),
        "macro_f1": MulticlassF1Score(20, average="macro")(logits, label),
    }
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(computed[name], value)


def test_confusion_matrix_of_the_test_is_scikit_learns() -> None:
    torch.manual_seed(0)
    task = build(num_classes=4)
    logits, label = torch.randn(30, 4), torch.randint(0, 4, (30,))
    for start in range(0, 30, 7):
        task.test_step({"input": logits[start : start + 7], "label": label[start : start + 7]}, 0)
    expected = confusion_matrix(label, logits.argmax(dim=1), labels=range(4))
    assert task.confusion_matrix.compute().tolist() == expected.tolist()


def test_predictions_are_names_with_probabilities() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    columns = build().predictions(logits)
    assert columns["prediction"] == ["class 2", "class 0"]
    # e / (2 + e) and e^2 / (2 + e^2)
    assert columns["probability"] == pytest.approx([0.5761169, 0.7869860])


@pytest.mark.parametrize("net", [nn.Linear(4, 2), nn.Linear(4, 5), nn.Unflatten(1, (2, 2))])
def test_another_number_of_outputs_is_an_error(net: nn.Module) -> None:
    batch = {"input": torch.randn(6, 4), "label": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(ConfigError) as caught:
        build(net=net).compute_loss(batch)
    message = str(caught.value)
    assert f"`model.net` gives an output of shape {tuple(net(batch['input']).shape)} for 6 rows" in message
    assert "the data has 3 classes, so it must be (6, 3)" in message
    assert "Give the network 3 outputs, e.g. +model.net.num_classes=3." in message


def test_tasks_read_their_own_batch_key() -> None:
    image, tokens = torch.rand(2, 1, 4, 4), torch.ones(2, 3, dtype=torch.int64)
    vision = VisionTask(MLP(3, 1, 4, hidden_dims=(4,)), SGD, CONSTANT, num_classes=3, class_names=NAMES)
    text = TextTask(NgramBag(3, vocab_size=4, num_buckets=8), SGD, CONSTANT, num_classes=3, class_names=NAMES)
    assert vision({"image": image, "tokens": tokens}).equal(vision.net(image))
    assert text({"image": image, "tokens": tokens}).shape == (2, 3)
