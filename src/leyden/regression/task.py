"""The regression task: squared error on standardised targets, metrics in the target's own units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.schedule import Schedule
from leyden.engine.task import Task
from leyden.errors import ConfigError
from leyden.regression.data import TableData
from leyden.regression.nets import Linear
from leyden.sharding import whole


class RegressionTask(Task):
    """Mean squared error; MSE, MAE and R2.

    The network works on standardised targets; the task scales its output back, so that predictions and metrics
    are in the target's own units. The loss stays on the standardised scale.

    Args:
        net: gives (B, num_targets) for `batch["features"]`.
        optim: called with the named parameters, gives the optimiser.
        schedule: factor of the learning rate over the steps.
        target_mean: taken from the training data, one value per target.
        target_std: taken from the training data, one value per target.
        seed: of randomness inside the step.
    """

    input_key: ClassVar[str] = "features"
    metric_names: ClassVar[tuple[str, ...]] = ("r2", "mae", "mse")
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        net: nn.Module,
        optim: Callable[..., torch.optim.Optimizer],
        schedule: Schedule,
        target_mean: Sequence[float],
        target_std: Sequence[float],
        seed: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__(net, optim, schedule, seed)
        self._test_pairs: list[tuple[Tensor, Tensor]] = []
        self.register_buffer("target_mean", torch.tensor(target_mean))
        self.register_buffer("target_std", torch.tensor(target_std))

    def build_metrics(self) -> MetricCollection:
        r2 = StandardisedR2(self.target_mean, self.target_std)
        return MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError(), "r2": r2})

    def forward(self, batch: Batch) -> Tensor:
        output: Tensor = self.net(batch["features"]) * self.target_std + self.target_mean
        return output

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output, target = self.net(batch["features"]), batch["target"]
        if output.shape != target.shape:
            raise ConfigError(
                f"`model.net` gives an output of shape {tuple(output.shape)}, but the target is {tuple(target.shape)}. "
                f"Give the network num_targets={target.shape[1]} outputs; shapes are never broadcast."
            )
        standardised = (target - self.target_mean) / self.target_std
        loss = torch.nn.functional.mse_loss(output, standardised)
        return loss, output * self.target_std + self.target_mean

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]

    def baseline_outputs(self, data: DataModule, num_rows: int) -> tuple[str, Tensor]:
        return "mean predictor", self.target_mean.cpu().repeat(num_rows, 1)

    def keep_tested(self, outputs: Tensor, batch: Batch) -> None:
        self._test_pairs.append((outputs, batch["target"]))

    def on_test_start(self) -> None:
        self._test_pairs.clear()

    def draw(self) -> dict[str, Figure]:
        predicted, true = (torch.cat(column).flatten().cpu() for column in zip(*self._test_pairs, strict=True))
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.scatter(true, predicted, s=12, alpha=0.6)
        axes.axline((float(true.mean()), float(true.mean())), slope=1, color="grey", linewidth=1)
        axes.set(xlabel="true", ylabel="predicted", title="Test: predicted and true values")
        axes.grid(alpha=0.3)
        return {"predicted_true": figure}

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        if outputs.shape[1] == 1:
            return {"prediction": outputs[:, 0].tolist()}
        return {f"prediction_{index}": column.tolist() for index, column in enumerate(outputs.unbind(dim=1))}

    def summary(self, data: DataModule) -> dict[str, float]:
        if not (isinstance(self.net, Linear) and isinstance(data, TableData) and self.net.head.out_features == 1):
            return {}
        encoder = data.encoder
        scales = torch.tensor(encoder.stds + [1.0] * (len(encoder.feature_names) - len(encoder.stds)))
        offsets = torch.tensor(encoder.means + [0.0] * (len(encoder.feature_names) - len(encoder.means)))
        head = {name: whole(value).detach().cpu() for name, value in self.net.head.named_parameters()}
        weight = head["weight"][0] * self.target_std.cpu() / scales
        bias = self.target_mean.cpu() + head["bias"] * self.target_std.cpu() - weight @ offsets
        named = zip(encoder.feature_names, weight.tolist(), strict=True)
        return {**{f"coefficient/{name}": value for name, value in named}, "coefficient/bias": float(bias)}


class StandardisedR2(R2Score):
    """R2 over all samples, summed on standardised values: R2 does not change, float32 rounding does."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.clone(), persistent=False)
        self.register_buffer("std", std.clone(), persistent=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds rows of shape (B, num_targets)."""
        preds, target = (preds - self.mean) / self.std, (target - self.mean) / self.std
        super().update(*(x.squeeze(1) if x.shape[1] == 1 else x for x in (preds, target)))

    def compute(self) -> Tensor:
        """R2, or NaN for fewer than two rows, whose variance is not defined."""
        return super().compute() if self.total >= 2 else torch.full((), torch.nan, device=self.mean.device)
