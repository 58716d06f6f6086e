"""`validate`: every problem of a composed config in one message, with key, value, what is allowed and the next step."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Ge
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from leyden.config import FACTS, closest, conf_dir, conf_dirs, list_options, validate
from leyden.errors import ConfigError
from leyden.signatures import locate, parameters


@functools.cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", ["name=test", *overrides])


def config(changes: dict[str, Any] | None = None, experiment: str = "regression", drop: str = "") -> DictConfig:
    """The composed config of an experiment with some keys set, new ones included, or one left out."""
    cfg = copy.deepcopy(composed(f"experiment={experiment}"))
    OmegaConf.set_struct(cfg, False)
    for key, value in (changes or {}).items():
        OmegaConf.update(cfg, key, value, force_add=True)
    if drop:
        parent, _, name = drop.rpartition(".")
        del (OmegaConf.select(cfg, parent) if parent else cfg)[name]
    return cfg


def message_of(cfg: DictConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return str(caught.value)


@pytest.mark.parametrize("experiment", ["regression", "vision", "nlp"])
def test_experiments_have_no_problem(experiment: str) -> None:
    cfg = config(experiment=experiment)
    before = OmegaConf.to_yaml(cfg)
    validate(cfg)
    assert OmegaConf.to_yaml(cfg) == before  # checking changes nothing


@pytest.mark.parametrize("hardware", list_options("hardware"))
def test_options_of_hardware_have_no_problem(hardware: str) -> None:
    assert validate(composed("experiment=regression", f"hardware={hardware}")) is None  # type: ignore[func-returns-value]


# ---- one problem at a time -----------------------------------------------------------------------------------

ONE = {
    # unknown keys, at every depth
    "unknown section": ({"zzz": {}}, "There is no key `zzz`.", "Allowed: callbacks, data, engine"),
    "unknown section, near": ({"trainr": {}}, "There is no key `trainr`. Did you mean `trainer`?"),
    "unknown key": ({"data.batchsize": 3}, "There is no key `data.batchsize`. Did you mean `data.batch_size`?"),
    "unknown key of a nested block": (
        {"model.net.hiden_dim": 3},
        "There is no key `model.net.hiden_dim`. Did you mean `model.net.hidden_dim`?",
    ),
    "unknown key, nothing near": (
        {"model.net.zzz": 3},
        "There is no key `model.net.zzz`. Allowed: dropout, hidden_dim, num_features, num_layers, num_targets.",
    ),
    "unknown key of torch": ({"optim.weight_decy": 1}, "Did you mean `optim.weight_decay`?"),
    "unknown key of Lightning": ({"trainer.max_epoch": 1}, "Did you mean `trainer.max_epochs`?"),
    "unknown key of engine": ({"engine.precison": 1}, "Did you mean `engine.precision`?"),
    "unknown key of hardware": (
        {"hardware.gpus": 1},
        "There is no key `hardware.gpus`.",
        "Allowed: accelerator, channels_last, cudnn_benchmark, devices",
    ),
    "unknown key of paths": ({"paths.output": "x"}, "Did you mean `paths.outputs`?"),
    "unknown key of a callback": ({"callbacks.checkpoint.every": 1}, "There is no key `callbacks.checkpoint.every`."),
    # types and ranges
    "text for a number": ({"optim.lr": "fast"}, "`optim.lr` must be a valid number, got 'fast'."),
    "truth for a number": ({"optim.lr": True}, "`optim.lr` must be a valid number, got True."),
    "fraction for a count": ({"data.batch_size": 1.5}, "`data.batch_size` must be a valid integer, got 1.5."),
    "number for a truth": ({"test": 1}, "`test` must be a valid boolean, got 1."),
    "nothing for a number": ({"data.batch_size": None}, "`data.batch_size` must be a valid integer, got None."),
    "zero rate": ({"optim.lr": 0}, "`optim.lr` must be greater than 0, got 0."),
    "negative decay": ({"optim.weight_decay": -1}, "`optim.weight_decay` must be greater than or equal to 0, got -1."),
    "no samples": ({"data.batch_size": 0}, "`data.batch_size` must be greater than or equal to 1, got 0."),
    "no epochs": ({"trainer.max_epochs": 0}, "`trainer.max_epochs` must be greater than or equal to 1, got 0."),
    "no steps": ({"trainer.max_steps": 0}, "`trainer.max_steps` must be greater than or equal to 1 or -1, got 0."),
    "certain dropout": ({"model.net.dropout": 1.0}, "`model.net.dropout` must be less than 1, got 1.0."),
    "large share": ({"data.val_frac": 1.0}, "`data.val_frac` must be less than 1, got 1.0."),
    "word out of a list": (
        {"engine.precision": "fp16"},
        "`engine.precision` must be '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '64-true',",
        "or 64, got 'fp16'.",
    ),
    "number for a word": ({"engine.precision": 16}, "`engine.precision` must be '32-true',", "got 16."),
    "mode": (
        {
            "callbacks.early_stopping": {
                "_target_": "leyden.callbacks.early_stopping.EarlyStopping",
                "monitor": "val/loss",
                "mode": "least",
            }
        },
        "`callbacks.early_stopping.mode` must be 'min' or 'max', got 'least'.",
    ),
    "accelerator": (
        {"hardware.accelerator": "tpu"},
        "`hardware.accelerator` must be 'auto', 'cpu', 'gpu' or 'mps', got 'tpu'.",
    ),
    "strategy": (
        {"hardware.strategy": "fsdp3"},
        "`hardware.strategy` must be 'auto', 'ddp', 'fsdp', 'tensor_parallel' or 'fsdp_tensor_parallel'",
    ),
    "no devices": (
        {"hardware.devices": 0},
        "`hardware.devices` must be 'auto' or 'idle' or greater than or equal to 1",
        "got 0.",
    ),
    "negative index": ({"hardware.devices": [0, -1]}, "`hardware.devices` must be", "got [0, -1]."),
    "no clipping at 0": (
        {"engine.gradient_clip_norm": 0},
        "`engine.gradient_clip_norm` must be greater than 0, got 0.",
    ),
    "all of the devices": ({"hardware.devices": "all"}, "`hardware.devices` must be 'auto' or 'idle' or", "got 'all'."),
    "index as text": ({"hardware.devices": "3"}, "`hardware.devices` must be", "got '3'."),
    "too much memory": (
        {"hardware.memory_fraction": 1.5},
        "`hardware.memory_fraction` must be less than or equal to 1, got 1.5.",
    ),
    "no memory": ({"hardware.memory_fraction": 0}, "`hardware.memory_fraction` must be greater than 0, got 0."),
    "matmul precision": (
        {"hardware.matmul_precision": "low"},
        "`hardware.matmul_precision` must be 'highest', 'high' or 'medium', got 'low'.",
    ),
    "segments": ({"hardware.expandable_segments": "yes"}, "`hardware.expandable_segments` must be", "got 'yes'."),
    "text for a table": ({"data.reference": 3}, "`data.reference` must be a mapping, got 3."),
    "no network": ({"model.net": None}, "`model.net` must be", "got None."),
    # rules between keys
    "shares of rows": (
        {"data.val_frac": 0.6, "data.test_frac": 0.4},
        "`data.val_frac` and `data.test_frac` together must be below 1, or no row is left for training.",
    ),
    "two kinds of warm-up": (
        {"schedule.warmup_steps": 3, "schedule.warmup_frac": 0.1},
        "`schedule.warmup_steps` and `schedule.warmup_frac` both ask for warm-up. Set one of them to 0.",
    ),
    # keys that Leyden sets
    "accelerator of the trainer": (
        {"trainer.accelerator": "gpu"},
        "`trainer.accelerator` is set by Leyden. Use `hardware.accelerator` instead.",
    ),
    "benchmark of the trainer": ({"trainer.benchmark": True}, "Use `hardware.cudnn_benchmark` instead."),
    "devices of the trainer": ({"trainer.devices": 2}, "Use `hardware.devices` instead."),
    "precision of the trainer": ({"trainer.precision": 16}, "Use `engine.precision` instead."),
    "accumulation": ({"trainer.accumulate_grad_batches": 2}, "Use `engine.accumulate_batches` instead."),
    "clipping": ({"trainer.gradient_clip_val": 1.0}, "Use `engine.gradient_clip_norm` instead."),
    "folder of the trainer": ({"trainer.default_root_dir": "x"}, "Use `paths.outputs` instead."),
    "folder of a logger": (
        {"logger.tensorboard.save_dir": "x"},
        "`logger.tensorboard.save_dir` is set by Leyden. Use `paths.outputs` instead.",
    ),
    "optimiser of the task": ({"model.optim": {}}, "`model.optim` is set by Leyden. Use `optim` instead."),
    # targets
    "no such module": (
        {"model.net._target_": "nowhere.Net", "model.net": {"_target_": "nowhere.Net"}},
        "`model.net._target_`: there is nothing to build at 'nowhere.Net' (No module named 'nowhere').",
    ),
    "no such class": (
        {"schedule": {"_target_": "leyden.engine.schedule.Sawtooth"}},
        "`schedule._target_`: there is nothing to build at 'leyden.engine.schedule.Sawtooth'",
    ),
    "nothing to call": (
        {"schedule": {"_target_": "leyden.config.FACTS"}},
        "`schedule._target_`: 'leyden.config.FACTS' is not a class or function.",
    ),
    "block without a target": (
        {"callbacks.extra": {"monitor": "x"}},
        "`callbacks.extra` builds nothing, since it has no `_target_`. Name a class: "
        "+callbacks.extra._target_=MODULE.CLASS.",
    ),
    "word in place of a block": ({"logger.tensorboard": "yes"}, "`logger.tensorboard` builds nothing"),
    "block in a mapping": (
        {"data.reference": {"x": {"_target_": "leyden.nowhere"}}},
        "`data.reference.x._target_`: there is nothing to build at 'leyden.nowhere'",
    ),
    # the objective
    "metric that is not logged": (
        {"objective.metric": "val/rr2"},
        "`objective.metric` is 'val/rr2', which is never logged. Did you mean `val/r2`? Logged: train/loss, ",
        "test/mse",
    ),
    "metric of a test that is off": (
        {"objective.metric": "test/r2", "test": False},
        "`objective.metric` is 'test/r2', but `test` is false, so it is never known. Set test=true.",
    ),
    "objective mode": ({"objective.mode": "most"}, "`objective.mode` must be 'min' or 'max', got 'most'."),
    # interpolations and words for nothing
    "interpolation to nothing": (
        {"data.batch_size": "${nowhere}"},
        "An interpolation in the config cannot be resolved: Interpolation key 'nowhere' not found",
        "data.batch_size",
    ),
    "unset environment variable": ({"paths.data": "${oc.env:LEYDEN_UNSET}"}, "cannot be resolved", "LEYDEN_UNSET"),
    "the text None": (
        {"data.reference": "None"},
        "`data.reference` is the text 'None'. Write data.reference=null for no value.",
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_problem_is_said(name: str) -> None:
    changes, *words = ONE[name]
    message = message_of(config(changes))  # type: ignore[arg-type]
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("optim", "`optim` is required and was not given. Add it: +optim=VALUE."),
        ("objective.mode", "cannot be resolved"),  # the callbacks refer to it
        ("engine.precision", "`engine.precision` is required and was not given. Add it: +engine.precision=VALUE."),
        ("hardware.num_threads", "`hardware.num_threads` is required and was not given."),
        ("callbacks.checkpoint.monitor", "`callbacks.checkpoint.monitor` is required and was not given."),
        ("data._target_", "`data` builds nothing, since it has no `_target_`."),
    ],
)
def test_key_that_is_not_there(drop: str, words: str) -> None:
    assert words in message_of(config(drop=drop))


# ---- what is no problem --------------------------------------------------------------------------------------

FINE: dict[str, dict[str, Any]] = {
    "facts from the data": {"model.net.num_features": None, "model.target_mean": None},
    "facts by hand": {"model.net.num_features": 9},
    "whole number for a fraction": {"optim.weight_decay": 1},
    "argument of Lightning": {"trainer.profiler": "simple", "trainer.limit_val_batches": 0.5},
    "argument of torch": {"optim.amsgrad": True},
    "no callback": {"callbacks.progress": None, "callbacks.checkpoint": None},
    "no callbacks at all": {"callbacks": None, "logger": None},
    "list of devices": {"hardware.devices": [0, 2]},
    "test metric": {"objective.metric": "test/r2"},
    "seed 0": {"seed": 0},
    "largest seed": {"seed": 2**32 - 1},
    "interpolation": {"data.batch_size": "${trainer.max_epochs}"},
    "foreign class that takes anything": {"callbacks.extra": {"_target_": "builtins.dict", "anything": 1}},
    "idle devices": {"hardware.devices": "idle", "hardware.memory_fraction": 1},
    "without clipping": {"engine.gradient_clip_norm": None},
}


@pytest.mark.parametrize("name", FINE)
def test_no_problem(name: str) -> None:
    cfg = config(FINE[name])
    assert validate(cfg) is None  # type: ignore[func-returns-value]


def test_objective_of_a_plain_lightning_module_is_not_known() -> None:
    cfg = config({"objective.metric": "whatever"})
    cfg.model = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    assert validate(cfg) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1"])
def test_seeds_that_are_none(seed: Any) -> None:
    assert "`seed` must be" in message_of(config({"seed": seed}))


# ---- several at once -----------------------------------------------------------------------------------------


def test_all_problems_in_one_message() -> None:
    message = message_of(
        config(
            {
                "optim.lr": -1,
                "model.net.hiden_dim": 3,
                "trainer.accelerator": "gpu",
                "objective.metric": "val/f1",
                "engine.accumulate_batches": 0,
            }
        )
    )
    head, *problems = message.split("\n  - ")
    assert head == "5 problems in the configuration:"
    assert [problem.split("`")[1] for problem in problems] == [
        "engine.accumulate_batches",
        "model.net.hiden_dim",
        "optim.lr",
        "trainer.accelerator",
        "objective.metric",
    ]


def test_one_problem_has_no_heading() -> None:
    assert message_of(config({"optim.lr": -1})) == "`optim.lr` must be greater than 0, got -1."


def test_all_missing_values_are_listed_before_anything_else() -> None:
    message = message_of(config({"data.path": "???", "seed": "???", "optim.betas": ["???", 1], "optim.lr": -1}))
    assert message == (
        "These keys need a value and have none: `data.path`, `optim.betas[0]`, `seed`. "
        "Give them on the command line, e.g. data.path=VALUE."
    )


def test_missing_values_of_a_table() -> None:
    cfg = composed("experiment=regression", "data=table")
    assert "These keys need a value and have none: `data.path`, `data.target`." in message_of(cfg)


def test_lists_of_blocks_are_checked() -> None:
    cfg = config({"callbacks.extra": {"_target_": "builtins.dict", "parts": [{"_target_": "leyden.nowhere"}]}})
    assert "`callbacks.extra.parts[0]._target_`: there is nothing to build" in message_of(cfg)


# ---- helpers -------------------------------------------------------------------------------------------------


def test_closest() -> None:
    assert closest("weigth", ["height", "weight"]) == " Did you mean `weight`?"
    assert closest("zzz", ["height", "weight"]) == ""
    assert closest("x", []) == ""


def test_locate() -> None:
    assert locate("leyden.errors.ConfigError") is ConfigError
    for path in ("", ".", "leyden..config", "leyden.config.", "nowhere"):
        with pytest.raises(ConfigError, match=r"there is nothing to build at|is not a class"):
            locate(path)


def test_parameters() -> None:
    def function(a: int, /, b: Annotated[int, Ge(0)], *rest: int, c: int = 1, **more: int) -> None: ...

    def closed(a: int) -> None: ...

    named, takes_any = parameters(function)
    assert list(named) == ["b", "c"]  # a config cannot name what is given by position only
    assert takes_any
    assert parameters(closed)[1] is False


def test_facts_are_what_the_wiring_may_fill_in() -> None:
    assert {"num_classes", "num_features", "vocab_size", "target_mean"} <= FACTS
    assert "batch_size" not in FACTS


def test_own_configs_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert conf_dirs() == [conf_dir()]
    (tmp_path / "conf").mkdir()
    assert conf_dirs() == [tmp_path / "conf", conf_dir()]
    monkeypatch.chdir(conf_dir().parent)
    assert conf_dirs() == [conf_dir()]


def test_options_of_a_group_with_their_first_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "mine.yaml").write_text("# @package _global_\n# My own.\nlr: 1 # no\n")
    (tmp_path / "conf" / "optim" / "sgd.yaml").write_text("# Another SGD.\n")
    (tmp_path / "conf" / "optim" / "bare.yaml").write_text("lr: 1\n")
    options = list_options("optim")
    assert options["mine"] == "My own."
    assert options["sgd"] == "Another SGD."  # the first folder wins
    assert options["bare"] == ""
    assert "adamw" in options
    assert list(options) == sorted(options)
    assert list_options("nothing") == {}
