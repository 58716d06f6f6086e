"""Number formats: what is refused where, bfloat16 with a float32 task around it, float16 with a loss scale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.epoch_state import MeanLoss
from leyden.engine.precision import check_precision, convert_net, run_in_precision, trainer_precision
from leyden.engine.schedule import Constant, Cosine, Schedule
from leyden.engine.settings import PLAIN_STEP
from leyden.engine.task import Task
from leyden.errors import ConfigError
from leyden.runner import quiet_libraries


@pytest.mark.parametrize(
    ("given", "meant"), [("32", "32-true"), (32, "32-true"), ("bf16", "bf16-true"), (64, "64-true")]
)
def test_a_format_alone_is_that_of_the_whole_network(given: Any, meant: str) -> None:
    assert replace(PLAIN_STEP, precision=given).number_format == meant


@pytest.mark.parametrize(
    ("precision", "accelerator", "allowed"),
    [
        ("16-mixed", "cpu", "32-true, bf16-mixed, bf16-true, 64-true. Use engine.precision=bf16-mixed."),
        ("64-true", "mps", "32-true, bf16-mixed, 16-mixed, bf16-true. Use engine.precision=32."),
    ],
)
def test_formats_that_a_device_lacks_are_refused(precision: str, accelerator: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_precision(precision, accelerator)
    assert str(caught.value).startswith(f"`engine.precision` {precision} does not work on {accelerator}: ")
    assert str(caught.value).endswith(allowed)
    check_precision(precision, "cuda")


def test_bfloat16_stays_inside_the_network() -> None:
    assert trainer_precision("bf16-true", owns_step=True) == "32-true"
    assert trainer_precision("bf16-true", owns_step=False) == "bf16-true"
    torch.manual_seed(0)
    net, rows = nn.Linear(3, 2), torch.randn(5, 3)
    with torch.no_grad():
        # Lightning's own whole bfloat16: weights and inputs rounded, arithmetic in bfloat16
        expected = nn.functional.linear(rows.bfloat16(), net.weight.bfloat16(), net.bias.bfloat16())
    convert_net(net, "bf16-true")
    output = net(rows)
    assert output.dtype == torch.float32
    assert net.weight.dtype == torch.bfloat16
    assert output.equal(expected.float())
    output.sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_restored_network_computes_as_in_training(precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, rows = nn.Linear(3, 2), torch.randn(5, 3)
    with torch.autocast("cpu", dtype):
        expected = net(rows)
    run_in_precision(net, precision)
    output = net(rows)
    assert expected.dtype == dtype
    assert output.dtype == torch.float32
    assert output.equal(expected.float())
    assert net.weight.dtype == torch.float32


def test_losses_are_summed_in_float32() -> None:
    mean = MeanLoss()
    # bfloat16 has 8 bits of significand: 1.0078125 * 257 would round to 260 there
    mean.update(torch.tensor([1.0078125], dtype=torch.bfloat16), torch.tensor([257]))
    assert float(mean.mean_value) == 1.0078125 * 257


class Points(DataModule):
    def load_splits(self) -> dict[str, Batch]:
        generator = torch.Generator().manual_seed(3)
        rows = {n: torch.randn(24, k, generator=generator) for n, k in (("input", 3), ("target", 2))}
        return {"train": rows, "val": rows, "test": rows}


class Fit(Task):
    metric_names = ("mse",)

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self(batch)
        return nn.functional.mse_loss(output, batch["target"]), output

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]


class Watched(Fit):
    """Keeps the norm before clipping and the gradient after it, at each step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.norms: list[float] = []
        self.clipped: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        assert self._grad_norm is not None
        self.norms.append(float(self._grad_norm))
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.clipped.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()])))


def fit_float16(
    folder: Path, fused: bool, scale: float, max_norm: float = 0.1, schedule: Schedule | None = None
) -> tuple[Watched, float]:
    """Float16 with a loss scale, which torch can also do on the CPU: slow, but the same steps as on a GPU."""
    quiet_libraries()
    torch.manual_seed(0)
    optim = partial(torch.optim.SGD, lr=0.1, fused=fused)
    task = Watched(nn.Linear(3, 2), optim, schedule or Constant())
    task.engine = replace(PLAIN_STEP, gradient_clip_norm=max_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer = Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(task, datamodule=Points(batch_size=8))
    assert trainer.global_step == 6
    return task, scaler.get_scale()


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_sees_the_gradient_without_its_scale(tmp_path: Path, fused: bool) -> None:
    task, scale = fit_float16(tmp_path, fused, scale=1024.0)
    assert scale == 1024.0
    data = Points(batch_size=8)
    data.setup()
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    batch = next(iter(data.train_dataloader()))
    nn.functional.mse_loss(net(batch["input"]), batch["target"]).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    assert task.norms[0] == pytest.approx(expected, rel=5e-3)  # float16 has 11 bits
    assert expected > 0.1
    assert task.clipped == pytest.approx([0.1] * 6, rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_overflow_that_finds_the_scale_does_not_stop_training(tmp_path: Path, fused: bool) -> None:
    # float16 ends at 65504 = 2**16: gradients of about 1 overflow with 2**18 and are halved until they fit
    task, scale = fit_float16(tmp_path, fused, scale=2.0**18, max_norm=100.0)
    overflowed = [not torch.isfinite(torch.tensor(norm)) for norm in task.norms]
    assert overflowed[0]
    assert not overflowed[-1]
    assert scale == 2.0 ** (18 - sum(overflowed))
    assert all(torch.isfinite(p).all() for p in task.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_overflow_does_not_advance_the_schedule(tmp_path: Path, fused: bool) -> None:
    schedule = Cosine()
    task, _ = fit_float16(tmp_path, fused, scale=2.0**18, max_norm=100.0, schedule=schedule)
    overflowed = [not torch.isfinite(torch.tensor(norm)) for norm in task.norms]
    count = sum(overflowed)
    assert overflowed == [True] * count + [False] * (6 - count)
    assert 1 <= count <= 4
    # The first steps come to nothing; then the schedule begins
    expected = [0.1] * count + [0.1 * schedule.factor(step, 6) for step in range(6 - count)]
    assert task.rates == pytest.approx(expected, rel=1e-12)
    assert task.guard.num_skipped == count
