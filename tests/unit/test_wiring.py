"""From a config to built objects: facts of the data filled in, mismatches explained before training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from leyden.callbacks.checkpoint import Checkpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.loggers import History, TensorBoard
from leyden.callbacks.progress import Progress
from leyden.engine.schedule import Constant
from leyden.engine.task import Task
from leyden.errors import ConfigError, DataError
from leyden.hardware.plan import plan_hardware
from leyden.hardware.probe import Hardware
from leyden.regression.data import AutoMpg, LineData
from leyden.regression.nets import MLP, Linear
from leyden.regression.task import RegressionTask
from leyden.wiring import (
    assemble,
    build_callbacks,
    build_data,
    build_loggers,
    build_task,
    build_trainer,
    check_fit,
    drop_replaced_keys,
    fill_facts,
)

FACTS = {"num_features": 1, "num_targets": 1, "target_mean": [4.0], "target_std": [2.0]}


def config(**changes: Any) -> DictConfig:
    """A small whole config: a line through three points."""
    cfg = OmegaConf.create(
        {
            "name": "test",
            "seed": 3,
            "test": True,
            "objective": {"metric": "val/loss", "mode": "min"},
            "paths": {"outputs": "outputs", "data": "data"},
            "data": {"_target_": "leyden.regression.data.LineData", "batch_size": 3, "seed": "${seed}"},
            "model": {
                "_target_": "leyden.regression.task.RegressionTask",
                "target_mean": None,
                "target_std": None,
                "seed": "${seed}",
                "net": {"_target_": "leyden.regression.nets.Linear", "num_features": None, "num_targets": None},
            },
            "optim": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
            "schedule": {"_target_": "leyden.engine.schedule.Constant"},
            "engine": {
                "precision": "32-true",
                "accumulate_batches": 2,
                "micro_batch_size": None,
                "remember_micro_batch_size": True,
                "inject_out_of_memory_above": None,
                "steps_per_execution": "auto",
                "gradient_clip_value": None,
                "gradient_clip_norm": 1.5,
                "ema_decay": None,
                "ema_start_step": 0,
                "non_finite": "stop",
                "max_skipped_steps": 10,
                "compile": "off",
                "activation_checkpointing": False,
                "deterministic": True,
            },
            "trainer": {"_target_": "lightning.pytorch.Trainer", "max_epochs": 4},
            "callbacks": {
                "checkpoint": {
                    "_target_": "leyden.callbacks.checkpoint.Checkpoint",
                    "monitor": "${objective.metric}",
                    "mode": "${objective.mode}",
                },
                "progress": {"_target_": "leyden.callbacks.progress.Progress"},
                "early_stopping": None,
            },
            "logger": {"tensorboard": {"_target_": "leyden.callbacks.loggers.TensorBoard"}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


@pytest.fixture(autouse=True)
def _deterministic_algorithms() -> Iterator[None]:
    """A Trainer with deterministic=True changes a global setting of torch."""
    yield
    torch.use_deterministic_algorithms(False)


PLAN = plan_hardware(Hardware((), False, "Xeon", 2), "cpu", "auto", "auto", None, None, "auto", None, None, None, False)


# ---- replaced targets ----------------------------------------------------------------------------------------


def test_settings_of_a_replaced_network_go(caplog: pytest.LogCaptureFixture) -> None:
    net = {"_target_": "torch.nn.Linear", "num_features": None, "hidden_dim": 3, "bias": False, "in_features": 1}
    cfg = config(model__net=net)
    OmegaConf.set_struct(cfg, True)
    with caplog.at_level(logging.INFO):
        drop_replaced_keys(cfg, ["model.net._target_=torch.nn.Linear", "seed=1"])
    assert set(cfg.model.net) == {"_target_", "bias", "in_features"}
    assert "model.net is now torch.nn.Linear; dropped what was set for another: " in caplog.text
    assert "num_features" in caplog.text
    assert "hidden_dim" in caplog.text


def test_settings_of_the_command_line_stay_to_be_refused() -> None:
    cfg = config(model__net__hidden_dim=3)
    drop_replaced_keys(cfg, ["model.net._target_=leyden.regression.nets.Linear", "+model.net.hidden_dim=3"])
    assert cfg.model.net.hidden_dim == 3


def test_settings_stay_where_no_target_is_given() -> None:
    cfg = config(model__net__hidden_dim=3)
    before = OmegaConf.to_container(cfg)
    drop_replaced_keys(cfg, ["seed=3", "model.net.hidden_dim=3"])
    assert OmegaConf.to_container(cfg) == before


# ---- facts ---------------------------------------------------------------------------------------------------


def block(target: str, **arguments: Any) -> DictConfig:
    cfg = OmegaConf.create({"_target_": target, **arguments})
    OmegaConf.set_struct(cfg, True)
    return cfg


def test_facts_are_filled_in_where_the_target_takes_them() -> None:
    net = block("leyden.regression.nets.MLP", num_features=None, num_targets=None, hidden_dim=8)
    fill_facts(net, "model.net", {**FACTS, "num_features": 9})
    assert net == {"_target_": "leyden.regression.nets.MLP", "num_features": 9, "num_targets": 1, "hidden_dim": 8}
    without_keys = block("leyden.regression.nets.Linear")
    fill_facts(without_keys, "model.net", FACTS)
    assert (without_keys.num_features, without_keys.num_targets) == (1, 1)


def test_fact_that_the_config_repeats_rightly_is_no_problem() -> None:
    net = block("leyden.regression.nets.Linear", num_features=1, num_targets=1)
    fill_facts(net, "model.net", FACTS)
    assert net.num_features == 1


def test_fact_that_the_config_says_otherwise_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        fill_facts(block("leyden.regression.nets.Linear", num_features=7), "model.net", FACTS)
    assert str(caught.value) == (
        "`model.net.num_features` is 7, but the data has 1. Leave it null to take it from the data."
    )


def test_fact_that_the_data_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        fill_facts(block("leyden.nlp.nets.CharCNN"), "model.net", {**FACTS, "num_classes": 2})
    message = str(caught.value)
    assert "`model.net._target_` leyden.nlp.nets.CharCNN needs vocab_size, which this data does not have" in message
    assert "(it has num_classes, num_features, num_targets, target_mean, target_std)." in message
    assert "Choose another model for this data, or set model.net.vocab_size." in message


# ---- task and data -------------------------------------------------------------------------------------------


def test_task_is_built_with_the_facts() -> None:
    cfg = config(schedule__warmup_steps=5)
    task = build_task(cfg, FACTS)
    assert isinstance(task, RegressionTask)
    assert isinstance(task.net, Linear)
    assert task.target_mean.tolist() == [4.0]
    assert task.seed == 3
    assert task.schedule.warmup_steps == 5
    assert task.optim(task.parameters()).param_groups[0]["lr"] == 0.1
    assert cfg.model.net.num_features == 1  # what checkpoints keep


def test_error_of_a_constructor_comes_out_as_it_is() -> None:
    cfg = config()
    cfg.model.net = {
        "_target_": "leyden.vision.nets.ViT",
        "num_classes": 2,
        "in_channels": 1,
        "image_size": 9,
        "patch_size": 2,
        "embed_dim": 8,
        "depth": 1,
        "num_heads": 2,
    }
    with pytest.raises(ConfigError, match="patch_size"):
        build_task(cfg, FACTS)


def test_plain_module_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config()
    cfg.model = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    task = build_task(cfg, FACTS)
    assert isinstance(task, LightningModule)
    assert "lightning.pytorch.demos.boring_classes.BoringModel is a plain LightningModule" in caplog.text
    assert "without Leyden's metrics over whole epochs, baseline, seeded steps and watch over" in caplog.text
    assert "; `optim` does not reach it; `schedule` does not reach it." in caplog.text


def test_data_is_loaded() -> None:
    data = build_data(config())
    assert isinstance(data, LineData)
    assert data.seed == 3
    assert data.num_samples("train") == 3


# ---- fit of task and data ------------------------------------------------------------------------------------


def task_of(net: nn.Module) -> RegressionTask:
    return RegressionTask(net, partial(torch.optim.SGD, lr=0.1), Constant(), [4.0], [2.0])


def line(batch_size: int = 3) -> LineData:
    data = LineData(batch_size=batch_size)
    data.setup()
    return data


def test_fitting_task_is_left_as_it_was() -> None:
    task, data = task_of(MLP(1, 1, dropout=0.5)), line()
    torch.manual_seed(5)
    check_fit(task, data)
    assert task.training
    assert data.min_last_train == 1
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1).equal(after)  # the check draws no random number


def test_network_that_cannot_take_the_batch_is_explained() -> None:
    with pytest.raises(ConfigError) as caught:
        check_fit(task_of(Linear(9, 1)), line())
    message = str(caught.value)
    assert "`model.net` (leyden.regression.nets.Linear) cannot take a batch of LineData" in message
    assert "'features': (2, 1)" in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert "Choose a network for this data, or change its arguments under model.net." in message


def test_network_with_another_output_has_the_tasks_own_message() -> None:
    with pytest.raises(ConfigError, match="shapes are never broadcast"):
        check_fit(task_of(Linear(1, 4)), line())


class Silent(Linear):
    def forward(self, features: Tensor) -> Tensor:
        raise RuntimeError


def test_error_without_words_is_named() -> None:
    with pytest.raises(ConfigError, match="RuntimeError"):
        check_fit(task_of(Silent(1, 1)), line())


class Mixing(LineData):
    mixes_labels = True


def test_loss_that_knows_no_shares_refuses_mixed_labels() -> None:
    with pytest.raises(ConfigError) as caught:
        check_fit(task_of(Linear(1, 1)), Mixing(batch_size=3))
    message = str(caught.value)
    assert message.startswith("`data.augment` mixes labels, but the loss of RegressionTask does not use")
    assert "set the task's takes_mixed_labels = True" in message


def test_error_of_a_datamodules_own_is_raised_as_such() -> None:
    flip = {"_target_": "leyden.data.batch_transforms.RandomFlip"}
    cfg = config(data={"_target_": "leyden.vision.data.Digits", "filters": {"flip": flip}})
    with pytest.raises(ConfigError, match=r"^`data\.filters\.flip` \(RandomFlip\) is random"):
        build_data(cfg)


def test_batch_norm_needs_two_samples() -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(ConfigError) as caught:
        check_fit(task_of(net), line(batch_size=1))
    message = str(caught.value)
    assert "`data.batch_size` is 1, but `model.net` has BatchNorm, which cannot train on one sample." in message
    assert "Use data.batch_size=2 or more, or a network with GroupNorm or LayerNorm." in message
    data = line(batch_size=2)
    check_fit(task_of(net), data)
    assert data.min_last_train == 2
    assert net[1].num_batches_tracked == 0  # type: ignore[union-attr]


# ---- callbacks, loggers, trainer -----------------------------------------------------------------------------

STOPPING = {
    "_target_": "leyden.callbacks.early_stopping.EarlyStopping",
    "monitor": "${objective.metric}",
    "mode": "${objective.mode}",
}


def test_callbacks_are_built_and_the_checkpoint_gets_the_config() -> None:
    cfg = config(callbacks__early_stopping=STOPPING)
    checkpoint, progress, stopping = build_callbacks(cfg, {"seed": 3}, has_val=True)
    assert isinstance(checkpoint, Checkpoint)
    assert isinstance(progress, Progress)
    assert isinstance(stopping, EarlyStopping)
    assert checkpoint.config == {"seed": 3}
    assert checkpoint.monitor == stopping.monitor == "val/loss"


def test_without_validation_nothing_is_monitored(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(callbacks__early_stopping=STOPPING)
    callbacks = build_callbacks(cfg, {}, has_val=False)
    assert [type(callback) for callback in callbacks] == [Checkpoint, Progress]
    assert callbacks[0].monitor is None  # type: ignore[attr-defined]
    assert "There is no validation split: `val/loss` does not exist, so the last weights count" in caplog.text


def test_metric_of_training_needs_no_validation(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(objective__metric="train/loss", callbacks__early_stopping=STOPPING)
    callbacks = build_callbacks(cfg, {}, has_val=False)
    assert [type(callback) for callback in callbacks] == [Checkpoint, Progress, EarlyStopping]
    assert caplog.text == ""


def test_no_callbacks() -> None:
    assert build_callbacks(config(callbacks=None), {}, has_val=True) == []


def test_history_is_always_there(tmp_path: Path) -> None:
    history, board = build_loggers(config(), tmp_path)
    assert isinstance(history, History)
    assert isinstance(board, TensorBoard)
    assert Path(board.save_dir or "") == tmp_path
    assert [type(logger) for logger in build_loggers(config(logger=None), tmp_path)] == [History]
    assert [type(logger) for logger in build_loggers(config(logger__tensorboard=None), tmp_path)] == [History]


def test_trainer_is_that_of_the_sections(tmp_path: Path) -> None:
    cfg = config()
    callbacks = build_callbacks(cfg, {}, has_val=True)
    trainer = build_trainer(cfg, PLAN, tmp_path, callbacks, build_loggers(cfg, tmp_path))
    assert trainer.max_epochs == 4
    # A task of Leyden accumulates and clips by itself; a plain LightningModule leaves it to the trainer.
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (1, None)
    plain = build_trainer(cfg, PLAN, tmp_path, callbacks, build_loggers(cfg, tmp_path), owns_step=False)
    assert (plain.accumulate_grad_batches, plain.gradient_clip_val) == (2, 1.5)
    assert trainer.precision == "32-true"
    assert trainer.default_root_dir == str(tmp_path)
    assert trainer.num_devices == 1
    assert type(trainer.accelerator).__name__ == "CPUAccelerator"
    assert torch.are_deterministic_algorithms_enabled()
    assert trainer.progress_bar_callback is callbacks[1]
    assert trainer.checkpoint_callbacks == [callbacks[0]]
    assert [type(logger) for logger in trainer.loggers] == [History, TensorBoard]


def test_trainer_without_callbacks_has_none_of_lightnings_own(tmp_path: Path) -> None:
    trainer = build_trainer(config(), PLAN, tmp_path, [], [])
    assert trainer.checkpoint_callbacks == []
    assert trainer.progress_bar_callback is None
    assert trainer.loggers == []


def test_assembly_is_whole_and_its_config_has_the_facts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config()
    assembly = assemble(cfg, PLAN, tmp_path)
    assert isinstance(assembly.task, Task)
    assert assembly.config["model"]["net"]["num_features"] == 1
    assert assembly.config["model"]["target_mean"] == [4.0]
    assert assembly.config["data"]["seed"] == 3  # resolved
    assert cfg.model.net.num_features is None  # the caller's config stays as it was
    assert assembly.plan is PLAN
    checkpoint = next(c for c in assembly.trainer.checkpoint_callbacks if isinstance(c, Checkpoint))
    assert checkpoint.config == assembly.config
    assert checkpoint.monitor is None
    assert "There is no validation split" in caplog.text  # LineData has none


def test_initial_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    def weight(seed: int) -> Tensor:
        torch.rand(seed + 1)
        return assemble(config(seed=seed), PLAN, tmp_path).task.net.head.weight  # type: ignore[union-attr, return-value]

    assert weight(0).equal(weight(0))
    assert not weight(0).equal(weight(1))


def test_errors_of_the_data_come_out_as_they_are(tmp_path: Path) -> None:
    cfg = config()
    cfg.data = {"_target_": "leyden.regression.data.TableData", "path": str(tmp_path / "no.csv"), "target": "y"}
    with pytest.raises(DataError, match="There is no file"):
        assemble(cfg, PLAN, tmp_path)


def test_reference_in_the_config_is_plain_for_the_data() -> None:
    cfg = config()
    cfg.data = {"_target_": "leyden.regression.data.AutoMpg", "reference": {"label": "ridge", "r2": 0.8}}
    data = build_data(cfg)
    assert isinstance(data, AutoMpg)
    assert type(data.reference) is dict
