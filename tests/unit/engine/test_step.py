"""The optimisation step: equal to hand-written PyTorch, and independent of how a batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.schedule import Cosine, Schedule
from leyden.engine.settings import PLAIN_STEP, Engine
from leyden.engine.step import batch_length, clip_gradient, split_step
from leyden.engine.task import Task
from leyden.runner import quiet_libraries


class Points(DataModule):
    """26 rows of three features in float64."""

    def load_splits(self) -> dict[str, Batch]:
        generator = torch.Generator().manual_seed(3)
        rows = {
            n: torch.randn(26, k, generator=generator, dtype=torch.float64) for n, k in (("input", 3), ("target", 2))
        }
        return {"train": rows, "val": rows, "test": rows}


class Fit(Task):
    metric_names = ("mse",)

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self(batch)
        return (output - batch["target"]).pow(2).mean(), output

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]


def build_net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).double()


ADAM = partial(torch.optim.Adam, lr=0.02)


def fit(
    folder: Path, engine: Engine, batch_size: int, epochs: int = 1, net: nn.Module | None = None, **trainer: Any
) -> Fit:
    quiet_libraries()
    task = Fit(net or build_net(), ADAM, Cosine(warmup_steps=1, final_frac=0.1), seed=5)
    task.engine = engine
    options = {
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "precision": "64-true",
        "default_root_dir": folder,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        **trainer,
    }
    Trainer(**options).fit(task, datamodule=Points(batch_size=batch_size, seed=1))
    return task


def write_by_hand(
    batch_size: int, accumulate: int, max_norm: float | None, epochs: int, schedule: Schedule
) -> nn.Module:
    """The same in plain PyTorch: mean loss over all samples of a step, clip, rate, step."""
    net, data = build_net(), Points(batch_size=batch_size, seed=1)
    data.setup()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    rows_per_step = batch_size * accumulate
    total = math.ceil(26 / rows_per_step) * epochs
    step = 0
    for epoch in range(epochs):
        loader = data.train_dataloader()
        loader.set_epoch(epoch)
        batches = list(loader.batches())
        rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        for start in range(0, 26, rows_per_step):
            part = {name: tensor[start : start + rows_per_step] for name, tensor in rows.items()}
            optimizer.param_groups[0]["lr"] = 0.02 * schedule.factor(step, total)
            optimizer.zero_grad()
            (net(part["input"]) - part["target"]).pow(2).mean().backward()
            if max_norm:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            step += 1
    return net


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (1, 0.1), (3, None), (3, 0.1)])
def test_steps_equal_plain_pytorch(tmp_path: Path, accumulate: int, max_norm: float | None) -> None:
    # 26 rows in batches of 4: seven batches, the last of two rows
    engine = replace(PLAIN_STEP, accumulate_batches=accumulate, gradient_clip_norm=max_norm, steps_per_execution=1)
    task = fit(tmp_path, engine, batch_size=4, epochs=2)
    expected = write_by_hand(4, accumulate, max_norm, 2, Cosine(warmup_steps=1, final_frac=0.1))
    assert largest_difference(task.net, expected) < 1e-14
    assert largest_difference(task.net, build_net()) > 1e-3


def test_three_steps_equal_plain_pytorch_to_the_last_bit(tmp_path: Path) -> None:
    """Accumulation, clipping by norm, warm-up and cosine: 26 rows in batches of 4, three of them a step."""
    schedule = Cosine(warmup_steps=1, final_frac=0.1)
    engine = replace(PLAIN_STEP, accumulate_batches=3, gradient_clip_norm=0.1)
    task = fit(tmp_path, engine, batch_size=4, net=build_net())
    net, data = build_net(), Points(batch_size=4, seed=1)
    data.setup()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    batches = list(data.train_dataloader().batches())
    # Half of the peak, the peak, and the end of the cosine, a tenth of it
    for step, rate in enumerate((0.01, 0.02, 0.002)):
        group = batches[3 * step : 3 * step + 3]
        num_rows = sum(len(batch["input"]) for batch in group)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for batch in group:
            loss = (net(batch["input"]) - batch["target"]).pow(2).mean()
            (loss * (len(batch["input"]) / num_rows)).backward() if len(batch["input"]) < num_rows else loss.backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.1
        optimizer.step()
        assert schedule.factor(step, 3) * 0.02 == pytest.approx(rate, rel=1e-15)
    assert task.trainer.global_step == 3
    assert all(a.equal(b) for a, b in zip(task.net.parameters(), net.parameters(), strict=True))
    assert largest_difference(task.net, build_net()) > 1e-3


@pytest.mark.parametrize("micro_batch_size", [1, 3, 10, 100])
def test_micro_batches_change_nothing(tmp_path: Path, micro_batch_size: int) -> None:
    whole = fit(tmp_path, PLAIN_STEP, batch_size=10, epochs=2)
    cut = fit(tmp_path, replace(PLAIN_STEP, micro_batch_size=micro_batch_size), batch_size=10, epochs=2)
    assert largest_difference(whole.net, cut.net) < 1e-14


def test_accumulated_batches_equal_one_batch(tmp_path: Path) -> None:
    # 26 = 2 * 12 + 2 = 2 * (4 * 3) + 2: three steps either way, the last of two rows
    once = fit(tmp_path, PLAIN_STEP, batch_size=12, epochs=2)
    parts = fit(tmp_path, replace(PLAIN_STEP, accumulate_batches=3), batch_size=4, epochs=2)
    assert largest_difference(once.net, parts.net) < 1e-14


@pytest.mark.parametrize("steps", [2, 5, 7, 32])
def test_several_steps_per_call_change_nothing(tmp_path: Path, steps: int) -> None:
    options = {"log_every_n_steps": 100, "max_steps": 11}
    single = fit(tmp_path, replace(PLAIN_STEP, steps_per_execution=1), 4, epochs=3, net=build_net(0.5), **options)
    several = fit(tmp_path, replace(PLAIN_STEP, steps_per_execution=steps), 4, epochs=3, net=build_net(0.5), **options)
    assert single.trainer.global_step == several.trainer.global_step == 11
    assert largest_difference(single.net, several.net) == 0


def test_calls_end_where_something_is_logged_or_validated() -> None:
    engine = replace(PLAIN_STEP, steps_per_execution=16)
    assert engine.choose_steps_per_call(0.0, [20]) == 10
    assert engine.choose_steps_per_call(0.0, [50]) == 10
    assert engine.choose_steps_per_call(0.0, [20, 8]) == 4
    assert engine.choose_steps_per_call(0.0, [7]) == 7
    auto = replace(PLAIN_STEP, steps_per_execution="auto")
    # 50 ms a call: five steps of 10 ms, one of 100 ms
    assert auto.choose_steps_per_call(0.01, [100]) == 5
    assert auto.choose_steps_per_call(0.1, [100]) == 1


@pytest.mark.parametrize("every", [2, 3, 4, 6])
def test_validations_within_an_epoch_are_at_the_same_steps(tmp_path: Path, every: int) -> None:
    # 26 rows in batches of 2: 13 batches an epoch, so its last call is shorter
    expected = [epoch * 13 + step for epoch in (0, 1) for step in range(every, 14, every)]
    for steps in (1, 2, 3, 4, 6):
        steps_seen: list[int] = []

        class Note(Callback):
            def on_validation_end(self, trainer: Trainer, pl_module: Any, seen: list[int] = steps_seen) -> None:
                seen.append(trainer.global_step)

        options = {"val_check_interval": every, "log_every_n_steps": 12, "callbacks": [Note()]}
        fit(tmp_path, replace(PLAIN_STEP, steps_per_execution=steps), 2, epochs=2, **options)
        assert steps_seen == expected, steps


def test_weights_add_up_to_the_world_size() -> None:
    batches = [{"input": torch.zeros(5, 2)}, {"input": torch.zeros(2, 2)}]
    # Two processes; of 10 + 3 samples this one has 5 + 2, the other 5 + 1
    here = [part.weight for part in split_step(batches, [10, 3], micro_batch_size=2, world_size=2)]
    assert here == [2 * 2 / 13, 2 * 2 / 13, 1 * 2 / 13, 2 * 2 / 13]
    others = [{"input": torch.zeros(5, 2)}, {"input": torch.zeros(1, 2)}]
    there = [part.weight for part in split_step(others, [10, 3], micro_batch_size=None, world_size=2)]
    assert sum(here) + sum(there) == pytest.approx(2)
    assert [batch_length(batch) for batch in batches] == [5, 2]


def test_clipping_returns_the_norm_before() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    # |(3, 4)| = 5; scaled to 1 it is (0.6, 0.8)
    assert float(clip_gradient([weight], 1.0, None)) == pytest.approx(5.0)
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    assert clip_gradient([weight], None, 0.7) is None
    assert weight.grad.tolist() == pytest.approx([0.6, 0.7], rel=1e-5)


@pytest.mark.parametrize(("length", "sizes"), [(9, [3, 3, 3]), (8, [2, 3, 3])])
def test_processes_that_go_in_step_take_equally_many_micro_batches(length: int, sizes: list[int]) -> None:
    """17 rows on two processes, at most 4 at a time: 9 rows need three micro-batches, so the 8 rows are cut so too."""
    parts = list(split_step([{"x": torch.zeros(length)}], [17], 4, world_size=2, in_step=True))
    assert [len(part.batch["x"]) for part in parts] == sizes
    assert [part.weight for part in parts] == pytest.approx([size * 2 / 17 for size in sizes])
