"""Networks held in parts by two processes (and four) give what one process gives, and the same checkpoints."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (
    "experiment=nlp_transformer",
    "model.net.dropout=0",
    "model.net.embed_dim=16",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=6",
    "trainer.limit_val_batches=3",
    "trainer.limit_test_batches=2",
    "trainer.log_every_n_steps=1",
    # Keys of attention need no bias, so its gradient is rounding, which Adam would blow up
    "+optim.eps=1.0e-4",
)
OWN_CALLBACK = """
from pathlib import Path
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor


class Bytes(Callback):
    def on_train_start(self, trainer, task):
        parameters = list(task.net.parameters())
        own = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
        name = f"bytes{trainer.global_rank}.txt"
        Path(trainer.default_root_dir, name).write_text(f"{own} {sum(4 * p.numel() for p in parameters)}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("parts of a=network")
    (made / "own_callback.py").write_text(OWN_CALLBACK, encoding="utf-8")
    return made


def start(folder: Path, name: str, *arguments: str) -> Path:
    """Runs train.py in a process of its own; the run folder."""
    run = folder / name
    own = (f'hydra.run.dir="{run}"', "logger=null", "hardware.num_threads=1")
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *own, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def resume(folder: Path, run: Path, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "train.py"), f'resume="{run}"', "trainer.max_steps=-1", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Path:
    return start(folder, "one", *TEXT, "hardware=cpu")


def read(run: Path, name: str = "last") -> dict[str, object]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


def assert_same_weights(run: Path, other: Path, rel: float = 1e-5) -> None:
    """Weights and the optimiser's state by name, each tensor as a whole."""
    found, expected = read(run), read(other)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    states = [content["optimizer_states"][0] for content in (found, expected)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    pairs = {name: (value, expected["state_dict"][name]) for name, value in found["state_dict"].items()}
    for index, state in states[1]["state"].items():
        pairs |= {f"{index}.{name}": (states[0]["state"][index][name], value) for name, value in state.items()}
    for name, (value, reference) in pairs.items():
        assert type(value) is torch.Tensor, name
        assert (value - reference).norm() <= rel * reference.norm() + 1e-10, name


def history(run: Path) -> list[dict[str, float]]:
    rows = csv.DictReader((run / "history.csv").read_text(encoding="utf-8").splitlines())
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def metrics(run: Path) -> dict[str, float]:
    return json.loads((run / "metrics.json").read_text(encoding="utf-8"))


def assert_same_run(run: Path, other: Path) -> None:
    assert len(history(run)) == len(history(other))
    for row, expected in zip(history(run), history(other), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert metrics(run) == pytest.approx(metrics(other), rel=1e-5)
    assert_same_weights(run, other)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_two_processes_do_what_one_does_with_half_of_the_weights(
    folder: Path, one_process: Path, strategy: str
) -> None:
    callback = "+callbacks.bytes._target_=own_callback.Bytes"
    run = start(folder, strategy, *TEXT, f"hardware={strategy}_cpu", callback)
    assert_same_run(run, one_process)
    for rank in range(2):
        own, every = map(int, (run / f"bytes{rank}.txt").read_text().split())
        if strategy == "fsdp":
            assert own == pytest.approx(every / 2, rel=0.02)
        else:  # whole on both: embeddings, stem, norms, head, and the biases of what is added up
            block = 4 * (4 * 16 * 16 + 3 * 16 + 2 * 16 * 32 + 32)
            assert own == every - block // 2


def test_four_processes_do_both(folder: Path, one_process: Path) -> None:
    cpu = ("hardware.accelerator=cpu", "hardware.devices=4")
    run = start(folder, "both", *TEXT, "hardware=fsdp_tensor_parallel", *cpu)
    assert_same_run(run, one_process)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    return start(folder, "straight", *TEXT, *TWO_EPOCHS, "hardware=cpu")


TWO_EPOCHS = ("trainer.max_epochs=2", "schedule=constant", "schedule.warmup_frac=0.0", "engine.ema_decay=0.9")


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp_cpu", "cpu"), ("cpu", "fsdp_cpu"), ("tensor_parallel_cpu", "fsdp_cpu"), ("cpu", "tensor_parallel_cpu")],
)
def test_a_run_goes_on_under_another_strategy(folder: Path, straight: Path, before: str, after: str) -> None:
    """Stopped within the second epoch: weights, their average, the optimiser and the metrics so far go on."""
    run = start(folder, f"{before}-{after}", *TEXT, *TWO_EPOCHS, f"hardware={before}", "trainer.max_steps=9")
    resume(folder, run, f"hardware={after}", "hardware.num_threads=1")
    assert_same_weights(run, straight)
    assert metrics(run) == pytest.approx(metrics(straight), rel=1e-5)
    for name, value in read(run)["ema"]["raw"].items():
        reference = read(straight)["ema"]["raw"][name]
        assert (value - reference).norm() <= 1e-5 * reference.norm() + 1e-10, name


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_steps_that_are_cut_skipped_and_averaged(folder: Path, strategy: str) -> None:
    """Batches of 67 rows have 34 and 33 of them per process, in micro-batches of at most 13."""
    changes = (
        "engine.ema_decay=0.9",
        "engine.micro_batch_size=13",
        "engine.accumulate_batches=2",
        "engine.non_finite=skip",
        "engine.activation_checkpointing=true",
        "engine.gradient_clip_norm=0.1",
        "engine.gradient_clip_value=0.01",
        "data.batch_size=67",
    )
    one = start(folder, f"cut-one-{strategy}", *TEXT, *changes, "hardware=cpu")
    run = start(folder, f"cut-{strategy}", *TEXT, *changes, f"hardware={strategy}_cpu")
    assert_same_run(run, one)


def test_dropout_of_tensor_parallel_processes_is_that_of_one(folder: Path) -> None:
    changes = ("experiment=vision_vit", "model.net.dropout=0.3", "trainer.max_epochs=1", "+optim.eps=1.0e-4")
    one = start(folder, "vit-one", *changes, "hardware=cpu", "hardware.channels_last=false")
    run = start(folder, "vit", *changes, "hardware=tensor_parallel_cpu")
    assert_same_run(run, one)
    command = [sys.executable, "-m", "leyden.cli", "evaluate", str(run)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert f"test/accuracy = {metrics(run)['test/accuracy']:.6g}" in done.stdout, done.stdout + done.stderr


def test_a_part_of_a_batch_may_be_empty(folder: Path) -> None:
    """59 validation rows in batches of 58: of the second, with one row, the first process has none."""
    changes = ("experiment=regression", "trainer.max_epochs=1", "data.batch_size=58")
    one = start(folder, "empty-one", *changes, "hardware=cpu")
    run = start(folder, "empty", *changes, "hardware=fsdp_cpu")
    assert_same_run(run, one)


def test_plain_lightning_module_and_fused_sgd_are_refused(folder: Path) -> None:
    for changes, words in (
        (("optim=sgd",), "`optim.fused` is true, which torch's SGD does not have for a network that is held in parts"),
        (("model._target_=lightning.pytorch.demos.boring_classes.BoringModel",), "is not. Use hardware=ddp"),
    ):
        command = [sys.executable, str(ROOT / "train.py"), "experiment=regression", "hardware=fsdp_cpu", *changes]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert words in done.stdout + done.stderr
