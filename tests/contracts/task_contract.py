"""What every task keeps to. A task's test inherits the class and says how to build one and its data.

class TestVisionTask(ClassificationContract):
    def build_task(self) -> Task:
        return VisionTask(ResNet(3), SGD, Constant(), num_classes=3, class_names=["a", "b", "c"])

    def draw_inputs(self, num_rows: int) -> Tensor:
        return torch.rand(num_rows, 1, 8, 8)
"""

from __future__ import annotations

import io
import math
import pickle
from functools import partial

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.schedule import Constant
from leyden.engine.task import Task
from leyden.runs.results import compute_baseline

NUM_ROWS = 23  # neither a multiple of 7 nor of 2

SGD = partial(torch.optim.SGD, lr=0.1)
CONSTANT = Constant()


class TaskContract:
    """Loss, gradients, metrics, baseline, predictions and state."""

    def build_task(self) -> Task:
        """A small task; its weights may differ from call to call."""
        raise NotImplementedError

    def draw_batch(self, num_rows: int) -> Batch:
        """A random batch from torch's global generator."""
        raise NotImplementedError

    def expected_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, float]:
        """The metrics of all rows by scikit-learn."""
        raise NotImplementedError

    # ---- fixtures ------------------------------------------------------------------------------------------

    @pytest.fixture
    def task(self) -> Task:
        torch.manual_seed(0)
        task = self.build_task()
        task.setup("fit")
        return task.eval()

    @pytest.fixture
    def batch(self) -> Batch:
        torch.manual_seed(1)
        return self.draw_batch(NUM_ROWS)

    # ---- loss ----------------------------------------------------------------------------------------------

    def test_loss_is_a_finite_number(self, task: Task, batch: Batch) -> None:
        loss, outputs = task.train().compute_loss(batch)
        assert loss.shape == ()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert len(outputs) == NUM_ROWS

    @torch.no_grad()
    def test_loss_is_a_mean_over_rows(self, task: Task, batch: Batch) -> None:
        whole = float(task.compute_loss(batch)[0])
        parts = [float(task.compute_loss(part)[0]) * size(task, part) for part in cut(batch, 7)]
        assert math.fsum(parts) / NUM_ROWS == pytest.approx(whole, rel=1e-5)

    def test_gradients_reach_all_parameters(self, task: Task, batch: Batch) -> None:
        task.train().compute_loss(batch)[0].backward()
        for name, parameter in task.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name

    @torch.no_grad()
    def test_row_alone_equals_row_in_batch(self, task: Task, batch: Batch) -> None:
        together = task(batch)
        alone = torch.cat([task(part) for part in cut(batch, 1)])
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)

    # ---- metrics -------------------------------------------------------------------------------------------

    @torch.no_grad()
    @pytest.mark.parametrize("batch_size", [1, 7, NUM_ROWS])
    @pytest.mark.parametrize("phase", ["val", "test"])
    def test_metrics_are_scikit_learns_whatever_the_batch_size(
        self, task: Task, batch: Batch, batch_size: int, phase: str
    ) -> None:
        for index, part in enumerate(cut(batch, batch_size)):
            getattr(task, {"val": "validation_step", "test": "test_step"}[phase])(part, index)
        loss, outputs = task.compute_loss(batch)
        expected = {"loss": float(loss), **self.expected_metrics(outputs, batch)}
        assert task.compute_phase(phase) == pytest.approx(
            {f"{phase}/{name}": value for name, value in expected.items()}, rel=1e-5, abs=1e-6
        )

    @torch.no_grad()
    def test_reading_resets(self, task: Task, batch: Batch) -> None:
        task.validation_step({name: tensor.flip(0)[:9] for name, tensor in batch.items()}, 0)
        task.compute_phase("val")
        task.validation_step(batch, 0)
        again = task.compute_phase("val")
        task.validation_step(batch, 0)
        assert task.compute_phase("val") == again

    @torch.no_grad()
    def test_a_ranks_empty_part_counts_nothing(self, task: Task, batch: Batch) -> None:
        empty = {name: tensor[:0] for name, tensor in batch.items()}
        for phase, step in (("val", task.validation_step), ("test", task.test_step)):
            step(batch, 0)
            expected = task.compute_phase(phase)
            for part in (empty, batch, empty):
                step(part, 0)
            assert task.compute_phase(phase) == expected

    def test_metric_names_are_those_logged(self, task: Task) -> None:
        assert set(task.build_metrics()) == set(task.metric_names)

    def test_baseline_has_the_metrics(self, task: Task, batch: Batch) -> None:
        data = DataModule(batch_size=5)
        data.splits = {"train": batch, "test": {name: tensor[:11] for name, tensor in batch.items()}}
        label, values = compute_baseline(task, data)
        assert label
        assert set(values) == set(task.metric_names)
        # It looks at no input.
        for tensors in data.splits.values():
            tensors[task.input_key] = torch.zeros_like(tensors[task.input_key])
        assert compute_baseline(task, data) == (label, values)

    # ---- predictions and state -----------------------------------------------------------------------------

    @torch.no_grad()
    def test_predictions_have_a_plain_value_per_row(self, task: Task, batch: Batch) -> None:
        columns = task.predictions(task(batch))
        assert columns
        for name, values in columns.items():
            assert len(values) == NUM_ROWS, name
            assert {type(value) for value in values} <= {str, int, float}, name

    @torch.no_grad()
    def test_state_goes_through_a_file(self, task: Task, batch: Batch) -> None:
        file = io.BytesIO()
        torch.save(task.state_dict(), file)
        file.seek(0)
        torch.manual_seed(99)
        fresh = self.build_task().eval()
        assert not fresh(batch).equal(task(batch))
        fresh.load_state_dict(torch.load(file, weights_only=True))
        assert fresh(batch).equal(task(batch))

    @torch.no_grad()
    def test_pickles(self, task: Task, batch: Batch) -> None:
        assert pickle.loads(pickle.dumps(task))(batch).equal(task(batch))


class ClassificationContract(TaskContract):
    """A classification task: labels 0 .. 2, `draw_inputs` gives what the network takes."""

    num_classes = 3

    def draw_inputs(self, num_rows: int) -> Tensor:
        """Random inputs, one row each."""
        raise NotImplementedError

    def draw_batch(self, num_rows: int) -> Batch:
        label = torch.arange(num_rows).remainder(self.num_classes)
        return {self.build_task().input_key: self.draw_inputs(num_rows), "label": label}

    def expected_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, float]:
        predicted, true = outputs.argmax(dim=1), batch["label"]
        return {
            "accuracy": accuracy_score(true, predicted),
            "macro_f1": f1_score(true, predicted, average="macro", zero_division=0),
        }

    def test_baseline_names_the_most_frequent_class(self, task: Task, batch: Batch) -> None:
        data = DataModule(batch_size=5)
        data.splits = {"train": {"label": torch.tensor([2, 2, 0])}, "test": batch}
        label, values = compute_baseline(task, data)
        assert label == f"always '{task.class_names[2]}'"
        # Of 23 rows with labels 0, 1, 2, 0, ... seven have label 2: precision 7/23, recall 1, F1 = 14/30.
        assert values["accuracy"] == pytest.approx(7 / 23)
        assert values["macro_f1"] == pytest.approx(14 / 30 / 3)


def cut(batch: Batch, batch_size: int) -> list[Batch]:
    """A batch in parts."""
    num_rows = len(next(iter(batch.values())))
    return [
        {name: tensor[start : start + batch_size] for name, tensor in batch.items()}
        for start in range(0, num_rows, batch_size)
    ]


def size(task: Task, batch: Batch) -> int:
    """Rows of a batch."""
    return len(batch[task.input_key])
