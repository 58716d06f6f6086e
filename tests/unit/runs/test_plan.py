"""What fits into a budget, what is advised, and what a run on a GPU is warned of."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from leyden.config import validate
from leyden.engine import memory
from leyden.engine.parallel import cut_layers, own_bytes
from leyden.engine.settings import Engine
from leyden.engine.tracer import StepTracer
from leyden.entry import compose_config
from leyden.errors import ConfigError
from leyden.hardware.memory import GIB, MIB, Budget
from leyden.hardware.nvml import Gpu
from leyden.hardware.probe import Hardware
from leyden.runs import plan as plan_module
from leyden.runs import plan_advice
from leyden.runs.plan import Planner, Way, gpu_budget, warn_of_memory
from leyden.runs.plan_advice import advise
from leyden.runs.plan_layout import EXAMPLE_DEVICES, Layout
from leyden.wiring import build_data, build_task

CPU = Hardware((), False, "Xeon", 2)
TWO_GPUS = Hardware(("NVIDIA L4", "NVIDIA L4"), False, "Xeon", 2)
VIT = ("experiment=vision_vit", "data.batch_size=64", "model.net.embed_dim=16", "model.net.depth=6")
MLP = ("experiment=regression", "model.net.hidden_dim=256", "data.batch_size=256")


def compose(*overrides: str) -> DictConfig:
    cfg = compose_config([*overrides, "logger=null"])
    validate(cfg)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))


def planner(*overrides: str, usable: int | None = None, hardware: Hardware = CPU) -> Planner:
    cfg = compose(*overrides)
    data = build_data(cfg, only_outline=True)
    budget = None if usable is None else FixedBudget(usable, "a test")
    return Planner(cfg, data, build_task(cfg, data.facts), budget, hardware)


class FixedBudget(Budget):
    """All of it is usable."""

    @property
    def usable(self) -> int:
        return self.total


@pytest.fixture(scope="module")
def vit() -> Planner:
    """Without recomputing a step of one sample takes less than one of 64 with it."""
    return planner(*VIT)


def with_budget(found: Planner, usable: int) -> Planner:
    found.budget = FixedBudget(usable, "a test")
    return found


def test_largest_micro_batch_grows_with_the_budget_and_the_next_does_not_fit(vit: Planner) -> None:
    one = vit.memory(replace(vit.own, micro_batch_size=1)).total
    whole = vit.memory(vit.own).total
    sizes = []
    for share in (0.1, 0.3, 0.5, 0.8, 0.99):
        usable = int(one + share * (whole - one))
        size = with_budget(vit, usable).largest(vit.own)
        assert size is not None
        assert vit.memory(replace(vit.own, micro_batch_size=size)).total <= usable
        assert vit.memory(replace(vit.own, micro_batch_size=size + 1)).total > usable
        sizes.append(size)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    assert with_budget(vit, whole).largest(vit.own) == 64
    assert with_budget(vit, one).largest(vit.own) == 1
    assert with_budget(vit, one - 1).largest(vit.own) is None


def test_config_that_fits_stays(vit: Planner) -> None:
    found = advise(with_budget(vit, GIB))
    assert found.overrides == []
    assert found.largest_micro_batch_size == 64
    assert found.text[-1] == "The config fits as it is."


def test_few_parts_are_the_cheapest(vit: Planner) -> None:
    usable = vit.memory(replace(vit.own, micro_batch_size=24)).total
    found = advise(with_budget(vit, usable))
    assert found.largest_micro_batch_size == 24
    assert found.overrides == ["engine.micro_batch_size=22"]  # three equal parts
    assert "22 (the batch in 3 parts; the same result)" in found.text[-2]
    assert "auto would come to such parts too" in found.text[-1]


def test_recomputing_comes_before_many_parts(vit: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_advice, "MAX_CHEAP_PARTS", 1)
    usable = vit.memory(replace(vit.own, activation_checkpointing=True)).total
    assert advise(with_budget(vit, usable)).overrides == ["engine.activation_checkpointing=true"]
    both = replace(vit.own, activation_checkpointing=True, precision="bf16-mixed")
    if vit.memory(both).total < usable:
        found = advise(with_budget(vit, usable - 1)).overrides
        assert found == ["engine.activation_checkpointing=true", "engine.precision=bf16-mixed"]


def test_nothing_fits(vit: Planner) -> None:
    found = advise(with_budget(vit, 1000))
    assert found.overrides is None
    assert found.largest_micro_batch_size is None
    assert found.text[-1].startswith("Nothing fits, even 1 sample(s) at a time: ")
    assert "optim=sgd" in found.text[-1]


def test_advised_way_was_measured_and_fits() -> None:
    found = planner(*VIT, "engine.micro_batch_size=64", "engine.precision=bf16-mixed")
    whole = found.memory(found.own).total
    advice = advise(with_budget(found, int(0.6 * whole)))
    assert advice.way is not None
    assert found.row(advice.way).fits


def test_settings_that_are_no_longer_needed_are_taken_back() -> None:
    found = planner(*VIT, "engine.micro_batch_size=8")
    whole = Way(64, "bf16-mixed", True, "auto")
    assert plan_advice.overrides_of(found, whole) == [
        "engine.activation_checkpointing=true",
        "engine.precision=bf16-mixed",
        "engine.micro_batch_size=null",
    ]


def test_rows_mark_the_config_and_leave_out_what_cannot_be() -> None:
    found = planner(*MLP, "hardware=cpu")
    rows = list(found.rows())
    assert [row.way for row in rows].count(found.own) == 1
    assert {row.way.activation_checkpointing for row in rows} == {False}  # an MLP has no repeated blocks
    assert {row.way.strategy: row.layout for row in rows} == {
        "auto": Layout(1, 1),
        "ddp": Layout(8, 1),
        "fsdp": Layout(8, 1),
        "tensor_parallel": Layout(1, 8),
        "fsdp_tensor_parallel": Layout(4, 2),
    }
    assert all(row.fits is None for row in rows)
    assert len({row.way for row in rows}) == len(rows) <= 16
    assert (
        found.memory(replace(found.own, strategy="ddp", micro_batch_size=32)).batch * 8 == found.memory(found.own).batch
    )


def test_devices_are_those_of_the_config_or_of_the_machine() -> None:
    assert planner(*MLP).layouts["ddp"] == Layout(EXAMPLE_DEVICES)
    assert planner(*MLP, "hardware=ddp", "hardware.devices=4").layouts["ddp"] == Layout(4)
    assert planner(*MLP, "hardware=ddp", "hardware.devices=[0,1,2]").layouts["ddp"] == Layout(3)
    found = planner(*MLP, hardware=TWO_GPUS)  # which hardware=auto takes both of
    assert (found.own.strategy, found.layouts["ddp"], found.own.micro_batch_size) == ("ddp", Layout(2), 128)
    both = planner(*MLP, "hardware=fsdp_tensor_parallel", "hardware.devices=8", "hardware.tensor_parallel_size=4")
    assert both.layouts["fsdp_tensor_parallel"] == Layout(2, 4)


def test_only_what_the_network_can_do_is_compared() -> None:
    found = planner("experiment=nlp_transformer")  # of four heads
    assert found.layouts["tensor_parallel"] == Layout(1, 4)
    assert found.layouts["fsdp_tensor_parallel"] == Layout(4, 2)
    assert set(planner("experiment=vision").layouts) == {"auto", "ddp", "fsdp"}  # a CNN has no plan of its layers
    assert set(planner(*MLP, "engine.compile=default").layouts) == {"auto", "ddp"}
    single = planner(*MLP, "hardware=fsdp", "data.batch_size=16", "hardware.devices=8")
    assert {row.way.micro_batch_size for row in single.rows() if row.way.strategy == "fsdp"} == {2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("hardware=tensor_parallel", "hardware.devices=3"),
            "3 tensor parallel processes cannot share the 4 ",
        ),
        (("hardware=fsdp", "engine.precision=16-mixed"), "`engine.precision` is 16-mixed, whose loss scale"),
        (
            ("hardware=fsdp_tensor_parallel", "hardware.devices=6", "hardware.tensor_parallel_size=4"),
            "cannot lay out 6 device(s) with `hardware.tensor_parallel_size` 4",
        ),
    ],
)
def test_own_strategy_that_cannot_be_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        planner("experiment=nlp_transformer", *overrides)


def test_tensor_parallel_processes_hold_their_part() -> None:
    # The same step with one layer cut in two: 10 x 256 inputs' weights and their biases, and 256 x 256 after them
    found = planner(*MLP, "hardware=tensor_parallel_cpu")
    whole, cut = (found.memory(replace(found.own, strategy=name)) for name in ("auto", "tensor_parallel"))
    weights = [p.numel() * 4 for name, p in found.task.net.named_parameters()]
    assert whole.parameters == sum(weights) + sum(b.nbytes for b in found.task.buffers())
    own = own_bytes(cut_copy(found.task.net, 2))
    assert cut.parameters == whole.parameters - sum(weights) + own
    assert own < 0.6 * sum(weights)
    assert cut.optimizer_state == 2 * own
    assert cut.activations < whole.activations


def cut_copy(net: torch.nn.Module, size: int) -> torch.nn.Module:
    copied = copy.deepcopy(net)
    cut_layers(copied, size)
    return copied


def test_data_lives_on_the_device_where_it_fits() -> None:
    pixels = 8 * 8 + 8  # bytes of a picture and its label
    assert planner("experiment=vision").resident == (1197 + 240) * pixels
    assert planner("experiment=vision", "data.residency=host").resident == 0
    assert planner("experiment=vision", "hardware=cpu").resident == 0
    assert planner("experiment=vision", usable=1797 * pixels).resident == 0  # at most half of what is free
    assert planner("experiment=nlp_transformer").resident == 0  # texts are cut to their length on the host


def test_batch_norm_cannot_take_one_sample() -> None:
    cfg = compose(*MLP)
    data = build_data(cfg)
    task = build_task(cfg, data.facts)
    assert Planner(cfg, data, task, None, CPU).smallest("auto") == 1
    task.net.norm = torch.nn.BatchNorm1d(256)
    found = Planner(cfg, data, task, FixedBudget(10 * MIB, "a test"), CPU)
    assert found.smallest("auto") == 2
    assert found.largest(found.own) == 256


@pytest.mark.parametrize(
    ("hardware", "devices", "total"),
    [
        (CPU, "idle", None),
        (TWO_GPUS, "idle", 23_034 * MIB),
        (Hardware(("Unknown",), False, "Xeon", 2), "idle", None),
        (Hardware(("A", "B"), False, "Xeon", 2, (Gpu("A", None, 5, 5), Gpu("B", None, 7, 7))), [1], 7),
        (TWO_GPUS, [5], None),
    ],
)
def test_memory_of_the_gpu_that_is_here(hardware: Hardware, devices: Any, total: int | None) -> None:
    found = gpu_budget(devices, hardware)
    assert (found.total if found else None) == total


# ---- a run on a made-up GPU ----------------------------------------------------------------------------------------


def assembly(*overrides: str, **changes: Any) -> Any:
    cfg = compose(*overrides)
    data = build_data(cfg)
    task = build_task(cfg, data.facts)
    task.engine = Engine(**cfg.engine)
    trainer = SimpleNamespace(world_size=1, strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    hardware = SimpleNamespace(accelerator="cuda", strategy="auto", tensor_parallel_size=1, is_sharded=False)
    return SimpleNamespace(**{"task": task, "data": data, "trainer": trainer, "plan": hardware, **changes})


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(plan_module, "free_on", lambda device: num_bytes)


def test_run_that_will_not_fit_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free(monkeypatch, 2 * MIB)
    warn_of_memory(assembly(*VIT))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "but 1.9 MiB of what is free on cuda:0 (2.0 MiB) are for tensors" in message
    found = re.search(
        r"Use engine.micro_batch_size=(\d+) or engine.activation_checkpointing=true; `leyden plan`", message
    )
    assert found is not None
    caplog.clear()
    warn_of_memory(assembly(*VIT, f"engine.micro_batch_size={found[1]}"))
    assert not caplog.records
    warn_of_memory(assembly(*VIT, f"engine.micro_batch_size={int(found[1]) + 1}"))
    assert len(caplog.records) == 1


def test_fully_sharded_run_is_not_told_to_take_one_sample(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = assembly(*VIT)
    run.plan.strategy, run.plan.is_sharded, run.trainer.world_size = "fsdp", True, 2
    tracer = StepTracer(run.task, run.data, "cuda")
    one, two = (memory.share(tracer.measure(32, size), "fsdp", 2).total for size in (1, 2))
    free(monkeypatch, int((one + two) / 2 / 0.95))  # room for one, which check_sharding refuses
    warn_of_memory(run)
    message = caplog.records[0].getMessage()
    assert "Use engine.activation_checkpointing=true;" in message
    assert "micro_batch_size" not in message


def test_run_that_fits_is_not_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free(monkeypatch, GIB)
    warn_of_memory(assembly(*VIT))
    assert not caplog.records


def test_run_elsewhere_is_not_planned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free(monkeypatch, 1)
    run = assembly(*MLP)
    run.plan.accelerator = "cpu"
    warn_of_memory(run)
    run.plan.accelerator = "cuda"
    run.task = torch.nn.Linear(1, 1)
    warn_of_memory(run)
    assert not caplog.records


def test_run_whose_step_needs_values_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free(monkeypatch, 1)
    run = assembly(*MLP)
    compute = type(run.task).compute_loss

    def looks(task: Any, batch: Any) -> Any:
        loss, outputs = compute(task, batch)
        return loss * loss.item(), outputs

    monkeypatch.setattr(type(run.task), "compute_loss", looks)
    caplog.set_level(logging.INFO)
    warn_of_memory(run)
    assert "cannot be planned" in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)
