"""Running out of memory: the step is taken again in smaller parts, and nothing of the failed attempt is left."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch
from leyden.engine.exchange import into_buckets
from leyden.engine.known_sizes import read_size, write_size
from leyden.engine.out_of_memory import caught
from leyden.engine.schedule import Constant
from leyden.engine.settings import PLAIN_STEP, Engine
from leyden.engine.task import Task
from leyden.errors import OUT_OF_MEMORY_TEXTS, ConfigError, TrainingError, is_out_of_memory
from leyden.runner import quiet_libraries

AUTO = replace(PLAIN_STEP, micro_batch_size="auto")


class Points(DataModule):
    """26 rows of three features in float64."""

    def load_splits(self) -> dict[str, Batch]:
        generator = torch.Generator().manual_seed(3)
        rows = {
            n: torch.randn(26, k, generator=generator, dtype=torch.float64) for n, k in (("input", 3), ("target", 2))
        }
        return {"train": rows, "val": rows, "test": rows}


class Fit(Task):
    """Runs out of memory after the network's forward pass above so many samples, by phase.

    Attributes:
        limits: of "train" (from a step on) and "val".
    """

    metric_names = ("mse",)
    limits: dict[str, int]
    first_bad_step = 0

    def build_metrics(self) -> MetricCollection:
        return MetricCollection({"mse": MeanSquaredError()})

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self(batch)
        phase = "train" if self.net.training else "val"
        is_due = phase == "val" or self.trainer.global_step >= self.first_bad_step
        if is_due and len(output) > getattr(self, "limits", {}).get(phase, len(output)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (output - batch["target"]).pow(2).mean(), output

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, batch["target"]

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        return {"prediction": outputs.tolist()}


ADAM = partial(torch.optim.Adam, lr=0.02)


def build(engine: Engine, optim: Any = ADAM, norm: bool = False, dropout: float = 0.0) -> Fit:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)]
    task = Fit(nn.Sequential(*layers).double(), optim, Constant(), seed=5)
    task.engine = engine
    return task


def fit(folder: Path, task: Fit, batch_size: int = 13, **trainer: Any) -> Trainer:
    quiet_libraries()
    options = {
        "max_epochs": 2,
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
    built = Trainer(**options)
    built.fit(task, datamodule=Points(batch_size=batch_size, seed=1))
    return built


def assert_close(first: nn.Module, second: nn.Module) -> None:
    for (name, value), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-12, msg=name)


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, value), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert value.equal(other), name


# ---- loss and gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate_batches": 2},
        {"gradient_clip_norm": 0.1},
        {"ema_decay": 0.9},
        {"non_finite": "skip"},
        {"steps_per_execution": 2},
        {"steps_per_execution": "auto"},
    ],
    ids=str,
)
def test_same_result_as_with_more_memory(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, cut = build(replace(AUTO, **changes)), build(replace(AUTO, inject_out_of_memory_above=3, **changes))
    first, second = fit(tmp_path, whole), fit(tmp_path, cut)
    assert whole.micro_batches.size is None
    assert cut.micro_batches.size == 2  # 13 -> 7 -> 4 -> 2
    assert second.global_step == first.global_step == (2 if "accumulate_batches" in changes else 4)
    assert_close(cut.net, whole.net)
    for name, value in first.callback_metrics.items():
        assert float(second.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_failed_attempt_leaves_nothing(tmp_path: Path, how: str) -> None:
    """The same bits as with that size from the start: weights, running statistics, random numbers, metrics."""
    engine = replace(AUTO, inject_out_of_memory_above=7) if how == "backward" else AUTO
    failing, small = (
        build(engine, norm=True, dropout=0.5),
        build(replace(PLAIN_STEP, micro_batch_size=7), ADAM, True, 0.5),
    )
    if how == "forward":
        failing.limits = {"train": 7}
    first, second = (fit(tmp_path, task, max_epochs=1) for task in (small, failing))
    assert failing.micro_batches.found == 7
    assert_equal(failing.net, small.net)
    assert second.callback_metrics == first.callback_metrics


def test_partial_gradients_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The injected failure comes at the first weight, when the others have their gradient."""
    partial_gradients: list[bool] = []
    task = build(replace(AUTO, inject_out_of_memory_above=12))
    free = "leyden.engine.out_of_memory.free_memory"
    weight, last = task.net[0].weight, task.net[3].weight
    monkeypatch.setattr(free, lambda device: partial_gradients.append(weight.grad is None and last.grad is not None))
    fit(tmp_path, task, max_steps=1)
    assert partial_gradients == [True]


def test_later_step_is_cut_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, cut = build(AUTO), build(AUTO)
    cut.limits, cut.first_bad_step = {"train": 5}, 2
    fit(tmp_path, whole)
    with caplog.at_level(logging.INFO):
        fit(tmp_path, cut)
    assert_close(cut.net, whole.net)
    said = [r.getMessage() for r in caplog.records if "Out of memory" in r.getMessage()]
    assert said == [
        "Out of memory: each step of 13 samples is now taken as 4 x at most 4 (engine.micro_batch_size=4 starts like "
        "this)."
    ]


def test_whole_parts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = build(replace(AUTO, inject_out_of_memory_above=2))
    with caplog.at_level(logging.INFO):
        fit(tmp_path, task, batch_size=8, max_steps=1)
    assert "each step of 8 samples is now taken as 4 x 2 (engine.micro_batch_size=2" in caplog.text


def test_batch_norm_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = build(AUTO, norm=True)
    task.limits = {"train": 7}
    fit(tmp_path, task)
    task.limits = {"train": 4}
    with caplog.at_level(logging.INFO):
        fit(tmp_path, task)
    assert task.micro_batches.found == 4
    assert caplog.text.count("has BatchNorm, which sees micro-batches") == 1


def test_batch_norm_never_gets_one_sample(tmp_path: Path) -> None:
    task = build(AUTO, norm=True)
    task.limits = {"train": 3}
    fit(tmp_path, task)  # 13 -> 7 -> 4 -> 3
    assert task.micro_batches.found == 3
    parts = task.micro_batches.split([{"input": torch.arange(13)}], [13], 1)
    assert [part.batch["input"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]
    task = build(AUTO, norm=True)
    task.limits = {"train": 2}
    with pytest.raises(TrainingError, match="A training step on 3 samples at a time, with BatchNorm, does not fit"):
        fit(tmp_path, task)


def test_one_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as err:
        fit(tmp_path, build(replace(AUTO, inject_out_of_memory_above=0)))
    message = str(err.value)
    assert message.startswith("A training step on one sample at a time does not fit into memory: Injected by engine.")
    assert "Use engine.activation_checkpointing=true, engine.precision=bf16-mixed, a smaller network" in message
    assert "Memory: this process has" in message


@pytest.mark.parametrize(("size", "advice"), [(None, "7"), (4, "2")])
def test_other_sizes_do_not_adapt(tmp_path: Path, size: int | None, advice: str) -> None:
    task = build(replace(PLAIN_STEP, micro_batch_size=size, inject_out_of_memory_above=3))
    with pytest.raises(TrainingError, match=f"Use engine.micro_batch_size=auto, or {advice}"):
        fit(tmp_path, task)


def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = build(AUTO)
    monkeypatch.setattr(task, "metric_inputs", lambda outputs, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, task)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        caught(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))


# ---- optimiser step --------------------------------------------------------------------------------------------


class Failing(torch.optim.Adam):
    """Runs out of memory in some steps, when half of the parameters are updated and have their state."""

    def __init__(self, params: Any, lr: float, calls: tuple[int, ...] = ()) -> None:
        super().__init__(params, lr=lr)
        self.calls = calls
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count not in self.calls:
            return super().step(closure)
        group = self.param_groups[0]
        everything = group["params"]
        group["params"] = everything[:2]
        super().step()
        group["params"] = everything
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("clips", [{}, {"gradient_clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("is_direct", [True, False])
def test_first_optimiser_step_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips: dict[str, Any], is_direct: bool
) -> None:
    if not is_direct:
        monkeypatch.setattr("leyden.engine.direct.may_call_directly", lambda task, trainer: False)
    plain, failing = (build(replace(AUTO, **clips), partial(Failing, lr=0.02, calls=calls)) for calls in ((), (1,)))
    first, second = fit(tmp_path, plain), fit(tmp_path, failing)
    assert second.global_step == first.global_step == 4
    assert_equal(failing.net, plain.net)
    if clips:
        assert plain._grad_norm is not None
        assert failing._grad_norm is not None
        assert failing._grad_norm.equal(plain._grad_norm)
    progress = second.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    assert progress.total.ready == progress.total.completed == 4


def test_norm_of_a_repeated_step_is_that_before_clipping(tmp_path: Path) -> None:
    engine = replace(AUTO, gradient_clip_norm=0.1)
    plain, failing = (build(engine, partial(Failing, lr=0.02, calls=calls)) for calls in ((), (1,)))
    fit(tmp_path, plain, max_steps=1)
    fit(tmp_path, failing, max_steps=1)
    assert plain._grad_norm is not None
    assert failing._grad_norm is not None
    assert failing._grad_norm.equal(plain._grad_norm)
    assert float(plain._grad_norm) > 0.1


@pytest.mark.parametrize(
    ("calls", "says"),
    [((1, 2), r"Tried to allocate 2\.00 GiB\. Use an optimiser"), ((3,), "Weights may be half updated; go on from")],
)
def test_optimiser_step_that_cannot_be_repeated_ends_the_run(tmp_path: Path, calls: tuple[int, ...], says: str) -> None:
    with pytest.raises(TrainingError, match=rf"The optimiser step \(Failing\) does not fit into memory: .*{says}"):
        fit(tmp_path, build(AUTO, partial(Failing, lr=0.02, calls=calls)))


# ---- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [AUTO, PLAIN_STEP], ids=["auto", "null"])
def test_validation_goes_on_in_parts(tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    whole, cut = build(engine), build(engine)
    cut.limits = {"val": 4}
    with caplog.at_level(logging.INFO):
        first, second = fit(tmp_path, whole), fit(tmp_path, cut)
    assert cut.micro_batches.eval_size == 4  # 13 -> 7 -> 4
    assert cut.micro_batches.size is None
    assert_equal(cut.net, whole.net)
    for name, value in first.callback_metrics.items():
        assert float(second.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name
    assert caplog.text.count("Out of memory: batches are now evaluated 4 samples at a time.") == 1


def test_prediction_goes_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    task, batch = build(PLAIN_STEP), {"input": torch.randn(9, 3, dtype=torch.float64)}
    expected = task(batch)
    whole = Fit.forward

    def forward(self: Fit, batch: Batch) -> Tensor:
        if len(batch["input"]) > 2:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB).")
        return whole(self, batch)

    monkeypatch.setattr(Fit, "forward", forward)
    torch.testing.assert_close(task.predict_step(batch), expected)
    assert task.micro_batches.eval_size == 2  # 9 -> 5 -> 3 -> 2
    assert task.predict_step({"input": torch.zeros(0, 3, dtype=torch.float64)}).shape == (0, 2)


def test_evaluation_of_one_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    task = build(AUTO)
    task.limits = {"val": 0}
    with pytest.raises(TrainingError, match="The evaluation of one sample does not fit into memory: CUDA out of"):
        fit(tmp_path, task)


# ---- what is remembered ----------------------------------------------------------------------------------------


def test_next_run_starts_with_the_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = replace(AUTO, inject_out_of_memory_above=7)

    def run(engine: Engine, batch_size: int = 13) -> tuple[Fit, str]:
        caplog.clear()
        task = build(engine)
        task.micro_batches.folder = tmp_path / "sizes"
        with caplog.at_level(logging.INFO):
            fit(tmp_path, task, batch_size=batch_size)
        return task, caplog.text

    first, text = run(engine)
    assert "Out of memory" in text
    (path,) = (tmp_path / "sizes").iterdir()
    assert read_size(path) == 7
    again, text = run(engine)
    assert f"Micro-batches of 7 samples, since an earlier run needed them on this device ({path})" in text
    assert "Out of memory" not in text
    assert_equal(again.net, first.net)
    for other in (run(replace(engine, remember_micro_batch_size=False)), run(engine, batch_size=12)):
        assert "earlier run" not in other[1]
        assert "Out of memory" in other[1]
    assert run(AUTO)[0].micro_batches.size is None  # with more memory
    assert len(list((tmp_path / "sizes").iterdir())) == 2  # batches of 13 and of 12


def test_size_in_a_checkpoint_counts_more(tmp_path: Path) -> None:
    task = build(replace(AUTO, inject_out_of_memory_above=7))
    task.micro_batches.folder = tmp_path / "sizes"
    fit(tmp_path, task)
    resumed = build(replace(AUTO, inject_out_of_memory_above=7))
    resumed.micro_batches.folder = tmp_path / "sizes"
    resumed.micro_batches.restore(3)
    fit(tmp_path, resumed)
    assert resumed.micro_batches.size == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"micro_batch_size": 0}', '{"micro_batch_size": "x"}'])
def test_damaged_file_of_a_size_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "size.json").write_text(content)
    assert read_size(tmp_path / "size.json") is None


def test_size_that_cannot_be_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write_size(tmp_path / "file" / "size.json", 4)
    assert "The micro-batch size that fits is not kept for the next run" in caplog.text


# ---- which errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", OUT_OF_MEMORY_TEXTS)
def test_texts_stand_for_it(text: str) -> None:
    assert is_out_of_memory(RuntimeError(f"{text} at somewhere.cpp:127"))
    assert not is_out_of_memory(ValueError(text))


def test_kinds_stand_for_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(TrainingError("CUDA out of memory"))
    assert not is_out_of_memory(ConfigError("CUDA out of memory"))


def test_allocator_of_the_cpu_is_understood() -> None:
    failure = caught(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert failure is not None
    assert "DefaultCPUAllocator" in failure


# ---- exchange --------------------------------------------------------------------------------------------------


def test_buckets() -> None:
    floats = [torch.zeros(n) for n in (2, 2, 5, 1)]  # 8, 8, 20 and 4 bytes
    tensors = [*floats, torch.zeros(1, dtype=torch.float64)]
    buckets = into_buckets(tensors, num_bytes=16)
    assert [[id(t) for t in bucket] for bucket in buckets] == [
        [id(t) for t in group] for group in (floats[:2], floats[2:3], floats[3:], tensors[4:])
    ]
    assert into_buckets([]) == []
