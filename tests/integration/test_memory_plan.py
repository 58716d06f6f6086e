"""`leyden plan`, and how near its estimate is to what a real step allocates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from typer.testing import Result

MIB = 2**20
MARK = "the third step"


class Allocations(Callback):
    """Counts what torch's allocator gives and takes back in the third step; the second is counted too, so that what
    it leaves (its gradients) is known when the third gives it back.

    Attributes:
        peak: bytes above what was there when the third step began.
    """

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        elif trainer.global_step == 2:
            with record_function(MARK):
                pass

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._profile.__exit__(None, None, None)
            self.peak = self._find_peak()

    def _find_peak(self) -> int:
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        level = peak = base = 0
        for _, size in sorted(_events(results.experimental_event_tree()), key=lambda event: event[0]):
            level += size or 0
            base, peak = (level, level) if size is None else (base, max(peak, level))
        return peak - base


def _events(nodes: Any) -> Iterator[tuple[int, int | None]]:
    """Times, with the bytes that were allocated (or, negative, freed); None at the mark."""
    for node in nodes:
        if node.name == MARK:
            yield node.start_time_ns, None
        elif node.name == "[memory]":
            yield node.start_time_ns, node.typed[1].alloc_size
        yield from _events(node.children)


@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=vision", "data.batch_size=256"),
        ("experiment=vision_vit",),
        ("experiment=vision_vit", "engine.precision=bf16-mixed"),
        ("experiment=nlp_transformer",),
        ("experiment=nlp_transformer", "engine.micro_batch_size=16", "optim=muon", "engine.gradient_clip_norm=1.0"),
    ],
    ids=" ".join,
)
def test_activations_are_those_of_a_real_step(
    leyden: Callable[..., Result], overrides: tuple[str, ...], workspace: Path
) -> None:
    from leyden.entry import compose_config
    from leyden.launch.place import find_place
    from leyden.runner import plan_run, quiet_libraries
    from leyden.wiring import assemble

    run = [*overrides, "hardware=cpu", "logger=null", "engine.steps_per_execution=1", "trainer.max_steps=3"]
    planned = leyden("plan", *run, "--json")
    assert planned.exit_code == 0, planned.output
    own = next(row for row in json.loads(planned.stdout)["rows"] if row["is_config"])
    quiet_libraries()
    cfg = compose_config(run)
    allocations = Allocations()
    found = assemble(cfg, plan_run(cfg, find_place()), workspace / "run", [allocations])
    found.trainer.fit(found.task, found.data)
    # Both without the samples, and with the gradients that the step before left
    assert own["activations_bytes"] == pytest.approx(allocations.peak, rel=0.1)
    assert allocations.peak > MIB  # much more than what torch's profiler itself takes


def test_answer_without_a_gpu_and_without_the_data(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("plan", "experiment=vision_cifar10", "data.batch_size=8192", "--budget", "24GiB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Peak memory of a step of experiment=vision_cifar10 on each CUDA device, in MiB")
    head = next(line.split() for line in lines if "micro-batch" in line)
    parts = "weights gradients optimiser activations batch data peak"
    assert " ".join(head) == f"micro-batch precision recompute strategy {parts} fits"
    own = next(line for line in lines if line.lstrip().startswith("*"))
    assert own.split()[1:3] == ["8192", "32-true"]
    assert own.split()[-1] == "NO"
    assert (
        "The largest micro-batch that fits with engine.precision=32-true and hardware.strategy=auto: " in result.stdout
    )
    assert "The cheapest change that does: engine.micro_batch_size=" in result.stdout
    assert max(map(len, lines[: lines.index("")] if "" in lines else lines[:3])) <= 118
    assert not list(workspace.iterdir())  # nothing was read, and nothing is left


def test_json_says_what_the_table_says(leyden: Callable[..., Result], workspace: Path) -> None:
    result = leyden("plan", "experiment=vision_vit", "data.batch_size=512", "--budget", "1.2GiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["budget"]["total_bytes"] == int(1.2 * 2**30)
    (own,) = (row for row in found["rows"] if row["is_config"])
    parts = ("parameters", "gradients", "optimizer_state", "average", "activations", "batch", "resident")
    for row in found["rows"]:
        assert sum(row[f"{part}_bytes"] for part in parts) == row["peak_bytes"]
        assert row["fits"] == (row["peak_bytes"] <= found["budget"]["usable_bytes"])
    assert own["micro_batch_size"] == 512
    assert {row["strategy"] for row in found["rows"]} == {
        "auto",
        "ddp",
        "fsdp",
        "tensor_parallel",
        "fsdp_tensor_parallel",
    }
    assert "batch 512" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("experiment=vision", "--budget", "24"), "--budget is '24', which is no amount of memory."),
        (("experiment=vision", "--budget", "NVIDIA H20"), "Did you mean 'NVIDIA H200'?"),
        (("experiment=vision", "data.batch_size=0"), "`data.batch_size` must be greater than or equal to 1, got 0"),
        (("experiment=vision", "data.batchsize=1"), "Did you mean `data.batch_size`?"),
        (
            ("experiment=vision", "hardware=tensor_parallel"),
            "does not say how it is cut",
        ),
    ],
)
def test_what_is_wrong_is_one_message(
    leyden: Callable[..., Result], workspace: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = leyden("plan", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_help_has_an_example(leyden: Callable[..., Result]) -> None:
    words = " ".join(leyden("plan", "--help").output.split())
    assert "leyden plan experiment=vision_cifar10 data.batch_size=4096 --budget 24GiB" in words
