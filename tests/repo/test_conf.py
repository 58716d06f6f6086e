"""The config files: each says what it is, and the names that scripts rely on stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from leyden.config import list_options

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
FILES = sorted(CONF.rglob("*.yaml"))

# Scripts and people rely on these; taking one away is a breaking change and belongs in the CHANGELOG.
GOLDEN = [
    "callbacks.checkpoint.every_n_minutes",
    "callbacks.checkpoint.every_n_steps",
    "callbacks.checkpoint.keep",
    "callbacks.checkpoint.min_interval_s",
    "callbacks.checkpoint.mode",
    "callbacks.checkpoint.monitor",
    "callbacks.early_stopping",
    "callbacks.progress",
    "data.batch_size",
    "data.seed",
    "data.split_seed",
    "data.test_frac",
    "data.val_frac",
    "engine.accumulate_batches",
    "engine.activation_checkpointing",
    "engine.compile",
    "engine.deterministic",
    "engine.ema_decay",
    "engine.ema_start_step",
    "engine.gradient_clip_norm",
    "engine.gradient_clip_value",
    "engine.inject_out_of_memory_above",
    "engine.max_skipped_steps",
    "engine.micro_batch_size",
    "engine.non_finite",
    "engine.precision",
    "engine.remember_micro_batch_size",
    "engine.steps_per_execution",
    "hardware.accelerator",
    "hardware.channels_last",
    "hardware.cudnn_benchmark",
    "hardware.devices",
    "hardware.expandable_segments",
    "hardware.matmul_precision",
    "hardware.memory_fraction",
    "hardware.num_threads",
    "hardware.strategy",
    "hardware.tensor_parallel_size",
    "logger.tensorboard",
    "model.net.dropout",
    "model.net.hidden_dim",
    "name",
    "objective.metric",
    "objective.mode",
    "optim.lr",
    "optim.weight_decay",
    "paths.data",
    "paths.outputs",
    "schedule.warmup_frac",
    "schedule.warmup_steps",
    "seed",
    "test",
    "trainer.limit_train_batches",
    "trainer.limit_val_batches",
    "trainer.log_every_n_steps",
    "trainer.max_epochs",
    "trainer.max_steps",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_each_file_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines[:3] if line.startswith("#") and "@package" not in line]
    if path.parent.name != "help":
        assert comments, f"{path} starts without a comment"
        assert all(len(line) <= 120 for line in lines)


def test_golden_keys_are_there() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", return_hydra_config=False)
    missing = [key for key in GOLDEN if not has_key(cfg, key)]
    assert not missing


def has_key(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return node is not None and name in node


HEADER = ("Source:", "Command:", "Expected", "Time:")


@pytest.mark.parametrize("name", list_options("experiment"))
def test_experiment_header_tells_what_to_expect(name: str) -> None:
    header = [line for line in (CONF / "experiment" / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    for word in HEADER:
        assert word in text, f"{name}: header has no '{word}'"
    assert f"python train.py experiment={name}" in text
