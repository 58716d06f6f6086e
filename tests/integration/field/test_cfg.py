"""Configuration: what a command line may say, and what is answered when it says something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from leyden.data.datamodule import DataModule

FAST = ("debug=fast", "logger=null", "model.net.hidden_dim=8")


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it a failure to touch the data."""

    def touched(*_: object) -> None:
        raise AssertionError("the data was touched")

    monkeypatch.setattr(DataModule, "prepare_data", touched)
    monkeypatch.setattr(DataModule, "setup", touched)


def refused(result: object, *words: str) -> None:
    """Asserts that a run ended with one ConfigError that has these words, and without a traceback."""
    assert result.exit_code == 1, result.output
    assert "ConfigError" in result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output


# ---- CFG-01: file names that need no quotes --------------------------------------------------------------------


def test_cfg_01_printed_names_can_be_passed_back(train: Callable, leyden: Callable) -> None:
    result = train("debug=fast", "model.net.hidden_dim=8", "trainer.log_every_n_steps=1")
    assert result.exit_code == 0, result.output
    printed = re.search(r"^Run folder: (.+)$", result.output, flags=re.MULTILINE)
    assert printed
    assert Path(printed.group(1)).samefile(result.folder)
    checkpoints = sorted(path.name for path in result.folder.rglob("*.ckpt"))
    assert checkpoints == ["best.ckpt", "last.ckpt"]
    outputs = result.folder.parents[1]
    for path in outputs.rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name), path
    for run in (printed.group(1), result.folder / "checkpoints" / "best.ckpt"):
        evaluated = leyden("evaluate", run)
        assert evaluated.exit_code == 0, evaluated.output
        values = dict(line.split(" = ") for line in evaluated.output.splitlines())
        # debug=fast tests two batches, `evaluate` all rows, so only the names can be compared
        assert {f"test/{name}" for name in ("loss", "mse", "mae", "r2")} == set(values)


def test_cfg_01_foreign_name_with_equals_sign_is_answered_with_the_working_form(train: Callable) -> None:
    table = ("data=table", "data.target=mpg")
    refused(train(*FAST, *table, "data.path=a=b.csv"), "'key=\"a=b c\"'")
    quoted = train(*FAST, *table, 'data.path="a=b.csv"')
    assert quoted.exit_code == 1
    assert "There is no file" in quoted.output  # understood: it is the file that is missing
    assert "a=b.csv" in quoted.output


# ---- CFG-03: unknown keys --------------------------------------------------------------------------------------

TYPOS = {
    "trainer.max_epoch": "trainer.max_epochs",
    "data.batchsize": "data.batch_size",
    "model.net.hidden_dims": "model.net.hidden_dim",
    "callbacks.checkpoint.monitr": "callbacks.checkpoint.monitor",
    "hardware.device": "hardware.devices",
}


@pytest.mark.parametrize("key", [*list(TYPOS)[:3], "optim.learning_rate", "sed"])
@pytest.mark.usefixtures("no_data")
def test_cfg_03_unknown_key_is_refused_without_advice_to_add_it(train: Callable, key: str) -> None:
    # `learning_rate` is too far from `lr` to be guessed: all keys there are listed
    near = TYPOS.get(key, {"sed": "seed", "optim.learning_rate": "Keys of optim: fused, lr,"}.get(key))
    result = train(f"{key}=3")
    refused(result, f"`{key}`", near)
    assert f"+{key}" not in result.output
    assert not result.folders


@pytest.mark.usefixtures("no_data")
def test_cfg_03_unknown_keys_are_refused_also_when_they_are_added(train: Callable) -> None:
    result = train(*(f"+{key}=3" for key in TYPOS))
    refused(result, f"{len(TYPOS)} problems")
    for key, wanted in TYPOS.items():
        assert f"There is no key `{key}`. Did you mean `{wanted}`?" in result.output
    assert result.output.count("ConfigError") == 1
    assert not result.folders


@pytest.mark.usefixtures("no_data")
def test_cfg_03_keys_that_leyden_sets_name_the_key_to_use(train: Callable) -> None:
    set_by_leyden = {
        "trainer.logger": "logger",
        "trainer.devices": "hardware.devices",
        "trainer.accumulate_grad_batches": "engine.accumulate_batches",
    }
    added = train(*(f"+{key}=1" for key in set_by_leyden))
    for key, instead in set_by_leyden.items():
        refused(added, f"`{key}` is set by Leyden. Use `{instead}` instead.")
    refused(train("trainer.devices=1"), "`trainer.devices` is set by Leyden. Use `hardware.devices` instead.")


# ---- CFG-04: values of the wrong type --------------------------------------------------------------------------

WRONG = {
    "optim.lr=abc": "must be a valid number, got 'abc'",
    "optim.betas=[0.9]": "must be longer, got (0.9,)",
    "optim.weight_decay=-0.1": "must be greater than or equal to 0, got -0.1",
    "trainer.max_epochs=2.5": "must be a valid integer, got 2.5",
    "trainer.limit_train_batches=1.5": "must be less than or equal to 1 or a valid integer, got 1.5",
    "trainer.val_check_interval=x": "must be a valid number or a valid integer, got 'x'",
    "data.batch_size=010": "must be a valid integer, got '010'",
    "data.test_frac=half": "must be a valid number, got 'half'",
    "model.net.hidden_dim=8.5": "must be a valid integer, got 8.5",
    "engine.deterministic=maybe": "must be a valid boolean, got 'maybe'",
    "engine.precision=16": "'32-true'",
    "model.seed=null": "must be a valid integer, got None",
    "callbacks.checkpoint.mode=maximum": "must be 'min' or 'max', got 'maximum'",
}


@pytest.mark.usefixtures("no_data")
def test_cfg_04_wrong_types_are_a_line_each_with_key_value_and_type(train: Callable) -> None:
    result = train(*WRONG)
    refused(result, f"{len(WRONG)} problems")
    lines = result.output.splitlines()
    for argument, expected in WRONG.items():
        key = argument.split("=")[0]
        assert [line for line in lines if f"`{key}`" in line and expected in line], f"{key}: {result.output}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('optim.lr="1e-4"', "`optim.lr` must be a valid number, got '1e-4'."),
        ("data.batch_size=12:30:45", "`data.batch_size` must be a valid integer, got '12:30:45'."),
        ("optim.lr=true", "`optim.lr` must be a valid number, got True."),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_cfg_04_text_that_looks_like_a_number_is_refused_in_one_line(
    train: Callable, argument: str, message: str
) -> None:
    result = train(argument)
    refused(result)
    assert result.output.strip() == f"ConfigError: {message}"


def test_cfg_04_exponents_are_numbers_and_values_in_use_are_shown(train: Callable) -> None:
    result = train(*FAST, "optim.lr=1e-4", "data.batch_size=1_6")
    assert result.exit_code == 0, result.output
    assert "optim.lr=0.0001" in result.output
    assert "data.batch_size=16" in result.output
    saved = torch.load(result.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 1e-4


# ---- CFG-06: required values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("data=table",), ("data.path", "data.target")),
        (("experiment=nlp", "data=text_table"), ("data.path", "data.text", "data.label")),
        (("data=table", "model.net.hidden_dim=???"), ("data.path", "data.target", "model.net.hidden_dim")),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_cfg_06_all_missing_values_are_named_at_once(
    train: Callable, arguments: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    refused(train(*arguments), *(f"`{key}`" for key in missing))


@pytest.mark.usefixtures("no_data")
def test_cfg_06_own_experiment_with_missing_values(train: Callable, workspace: Path) -> None:
    (workspace / "conf" / "experiment").mkdir(parents=True)
    (workspace / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: table\ntrainer:\n  min_epochs: ???\n",
        encoding="utf-8",
    )
    refused(train("experiment=mine"), "`data.path`", "`data.target`", "`trainer.min_epochs`")


# ---- CFG-07: None and null -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_data")
def test_cfg_07_none_is_refused_naming_null(train: Callable) -> None:
    refused(train("logger=None"), "logger=null")
    keys = ("trainer.val_check_interval", "engine.gradient_clip_norm", "callbacks.early_stopping", "data.reference")
    result = train(*(f"{key}=None" for key in keys))
    for key in keys:
        refused(result, f"`{key}` is the text 'None'. Write {key}=null for no value.")


def test_cfg_07_null_is_nothing(train: Callable) -> None:
    keys = ("logger", "sweep", "debug", "engine.gradient_clip_norm")
    result = train("--cfg", "job", *(f"{key}=null" for key in keys))
    assert result.exit_code == 0, result.output
    cfg = OmegaConf.create(result.output)
    assert [OmegaConf.select(cfg, key) for key in keys] == [None] * len(keys)


@pytest.mark.usefixtures("no_data")
def test_cfg_07_null_where_something_is_needed_says_what(train: Callable) -> None:
    refused(train("experiment=null"), "`name` must be a valid string, got None")


# ---- CFG-08: plain containers below instantiate ----------------------------------------------------------------


def holds_config(value: object) -> bool:
    """Whether a value is, or has somewhere in it, a container of OmegaConf."""
    if isinstance(value, DictConfig | ListConfig):
        return True
    if isinstance(value, dict):
        return any(map(holds_config, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_config, value))


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=regression",),
        ("experiment=vision_fashion_mnist_mlp", "data=digits", "model.net.hidden_dims=[8]"),
        ("experiment=regression", "data=languages", "model=nlp_cnn", "model.net.channels=8"),
    ],
)
def test_cfg_08_objects_and_checkpoints_hold_plain_containers(train: Callable, arguments: tuple[str, ...]) -> None:
    from hydra.utils import instantiate

    from leyden.runs.restore import load_checkpoint, restore

    result = train("debug=fast", "logger=null", *arguments)
    assert result.exit_code == 0, result.output
    checkpoint = load_checkpoint(result.folder)
    saved = torch.load(checkpoint.path, weights_only=True)
    assert type(saved["optimizer_states"][0]["param_groups"][0]["betas"]) in (list, tuple)
    assert not holds_config(saved)
    task, data = restore(checkpoint)
    optimizer = task.optim([("weight", torch.nn.Parameter(torch.zeros(1)))])
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)
    cfg = OmegaConf.create(checkpoint.config)
    for built in (task, task.net, task.schedule, data, instantiate(cfg.optim, _convert_="all").keywords):
        attributes = built if isinstance(built, dict) else vars(built)
        assert not [name for name, value in attributes.items() if holds_config(value)]


# ---- CFG-10: interpolations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["job", "hydra", "all"])
def test_cfg_10_resolved_config_is_printed(train: Callable, part: str) -> None:
    result = train("experiment=vision", "paths.outputs=elsewhere", "--cfg", part, "--resolve")
    assert result.exit_code == 0, result.output
    assert "${" not in result.output
    shown = OmegaConf.create(result.output)
    if part != "job":
        assert shown.hydra.run.dir.startswith("elsewhere/vision/")
        assert shown.hydra.sweep.dir.startswith("elsewhere/vision/sweep_")
    if part != "hydra":
        assert shown.name == "vision"
        assert shown.callbacks.checkpoint.monitor == "val/loss"
    assert not result.folders


def test_cfg_10_sweep_makes_one_folder_with_one_folder_a_job(train: Callable, workspace: Path) -> None:
    result = train("-m", *FAST, "seed=1,2")
    assert result.exit_code == 0, result.output
    sweeps = list((workspace / "outputs" / "regression").iterdir())
    assert len(sweeps) == 1
    assert sorted(path.name for path in sweeps[0].iterdir() if path.is_dir()) == ["0", "1"]
    for job, folder in enumerate(result.folders):
        assert f"seed={job + 1}" in (folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    assert not [path for path in workspace.rglob("*") if "$" in path.name or "{" in path.name]
