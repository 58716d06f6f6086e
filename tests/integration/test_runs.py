"""What every run promises: equal results for equal seeds, a guard at the end, one folder per job."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
SHORT = ("trainer.max_epochs=2", "hardware=cpu", "hardware.num_threads=1")


def test_equal_seeds_give_equal_metrics_and_others_do_not(train: Callable) -> None:
    first, second, other = (train("experiment=vision", *SHORT, f"seed={seed}").metrics for seed in (0, 0, 1))
    assert first == second
    assert first != other


def test_line_is_learned_exactly(train: Callable) -> None:
    result = train("experiment=regression_line")
    assert result.exit_code == 0, result.output
    # y = 2x exactly, so w = 2, b = 0 and f(4) = 8
    assert result.metrics["coefficient/x"] == pytest.approx(2, abs=0.05)
    assert result.metrics["predict/4.0"] == pytest.approx(8, abs=0.05)
    assert "predict/4.0 = 8.0" in result.output


def test_table_shows_run_baseline_and_reference(train: Callable) -> None:
    result = train("experiment=regression", *SHORT)
    assert "mean predictor" in result.output
    assert "ridge regression" in result.output
    assert f"{result.metrics['test/r2']:.4f}" in result.output


def test_run_says_which_hardware_and_why(train: Callable) -> None:
    result = train("experiment=regression", *SHORT)
    line = next(line for line in result.output.splitlines() if line.startswith("Hardware: "))
    assert "CPU" in line
    assert "asked for" in line
    assert result.record["hardware"] in line


def test_run_record_tells_what_ran(train: Callable) -> None:
    record = train("experiment=regression", *SHORT).record
    assert record["state"] == "finished"
    assert record["seed"] == 0
    assert record["command"][1:] == ["train.py", "experiment=regression", *SHORT]
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert len(record["data"]["train"]["hash"]) == 32
    assert record["start"] <= record["end"]


def test_sweep_gives_each_job_its_own_folder(train: Callable, workspace: Path) -> None:
    result = train("-m", "experiment=regression", *SHORT, "seed=0,1", "optim.lr=0.01,0.003")
    assert result.exit_code == 0, result.output
    assert sorted(folder.name for folder in result.folders) == ["0", "1", "2", "3"]
    assert len({folder.parent for folder in result.folders}) == 1
    for folder, (seed, lr) in zip(result.folders, [(0, 0.01), (0, 0.003), (1, 0.01), (1, 0.003)], strict=True):
        cfg = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
        assert (cfg["seed"], cfg["optim"]["lr"]) == (seed, lr)
        assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["state"] == "finished"
    single = train("experiment=regression", *SHORT, "seed=1", "optim.lr=0.01")
    job = json.loads((result.folders[2] / "metrics.json").read_text(encoding="utf-8"))
    assert job == single.metrics, "a job of a sweep differs from the same run alone"


def test_no_step_taken_is_a_failure(train: Callable) -> None:
    result = train("experiment=regression", *SHORT, "trainer.limit_train_batches=0")
    assert result.exit_code == 1
    assert result.record["state"] == "failed"
    assert "step was taken" in result.output


def test_divergence_is_a_failure_and_no_checkpoint_holds_it(train: Callable) -> None:
    result = train("experiment=regression", *SHORT, "optim.lr=1e30", "trainer.log_every_n_steps=1")
    assert result.exit_code == 1
    assert "TrainingError" in result.output
    assert "Lower optim.lr" in result.output
    assert "Traceback" not in result.output
    assert "TrainingError" in result.record["reason"]
    for path in result.folder.rglob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.isfinite(value).all() for value in state.values())


def test_lost_checkpoint_is_a_failure(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.engine.checkpoint.write_checkpoint", lambda *_, **__: None)
    result = train("experiment=regression", *SHORT)
    assert result.exit_code == 1
    assert "was not written" in result.output


def test_fewer_samples_in_a_batch_than_devices_is_refused(train: Callable) -> None:
    devices = ("hardware=ddp", "hardware.accelerator=cpu", "hardware.devices=2")
    result = train("experiment=regression", *devices, "data.batch_size=1")
    assert result.exit_code == 1
    assert "`data.batch_size` is 1, but 2 devices share each batch. Use data.batch_size=2 or more" in result.output


def test_last_checkpoint_is_the_last_state_between_validations_too(train: Callable) -> None:
    # 255 rows in batches of 32 are 8 steps an epoch, and validation comes after each
    arguments = ("experiment=regression", "trainer.max_steps=13", "hardware.num_threads=1")
    results = [train(*arguments, f"engine.steps_per_execution={steps}") for steps in (1, 4, "auto")]
    for result in results:
        assert result.exit_code == 0, result.output
        assert torch.load(result.folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 13
        assert result.metrics == results[0].metrics


def test_early_stopping_stops_and_says_so(train: Callable) -> None:
    result = train(
        "experiment=regression",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=1",
        "callbacks.early_stopping.min_delta=100",
        "trainer.max_epochs=20",
    )
    assert result.exit_code == 0, result.output
    # The first validation counts as an improvement on infinity; the second is the first without one.
    assert "Stopped early after epoch 2: val/loss did not improve" in result.output


def test_tensorboard_has_scalars_config_pictures_and_results(train: Callable) -> None:
    result = train("experiment=vision", *SHORT)
    (path,) = (result.folder / "tensorboard").glob("events.*")
    events = EventAccumulator(str(path))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "val/accuracy", "test/accuracy", "objective"} <= set(scalars)
    assert "hp_metric" not in scalars
    assert [event.value for event in events.Scalars("objective")] == [pytest.approx(result.metrics["objective"])]
    assert events.Tags()["images"] == ["confusion_matrix"]
    assert "config/text_summary" in events.Tags()["tensors"]


def test_network_of_another_library(train: Callable, workspace: Path) -> None:
    from PIL import Image

    for split in ("train", "val", "test"):
        for label, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
            folder = workspace / "photos" / split / label
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (32, 32), tuple(c + 5 * index for c in colour)).save(folder / f"{index}.png")
    arguments = ("experiment=vision", "data=image_folder", "data.path=photos", *SHORT)
    network = "model.net._target_=torchvision.models.resnet18"
    result = train(*arguments, network)
    assert result.exit_code == 1
    assert "gives an output of shape (2, 1000) for 2 rows, but the data has 2 classes" in result.output
    assert "+model.net.num_classes=2" in result.output
    result = train(*arguments, network, "+model.net.num_classes=2")
    assert result.exit_code == 0, result.output
    assert "Model: ResNet, 11,177,538 parameters" in result.output  # resnet18 with 512 * 2 + 2 outputs in place of 1000


def test_network_that_does_not_fit_the_data_is_explained(train: Callable) -> None:
    result = train("experiment=vision", "model.net._target_=torchvision.models.resnet18", "+model.net.num_classes=10")
    assert result.exit_code == 1
    assert "cannot take a batch of Digits with shapes {'image': (2, 1, 8, 8)" in result.output
    assert "expected input[2, 1, 8, 8] to have 3 channels" in result.output
    assert "Traceback" not in result.output


PLAIN_MODULE = """
import lightning.pytorch as pl
import torch


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(9, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch["features"]) - batch["target"]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=len(batch["target"]))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.training_step(batch, batch_idx), batch_size=len(batch["target"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)
"""


def test_plain_lightning_module_runs_with_a_warning(train: Callable, workspace: Path) -> None:
    (workspace / "plain_module.py").write_text(PLAIN_MODULE, encoding="utf-8")
    arguments = ("experiment=regression", *SHORT, "model._target_=plain_module.Plain")
    result = train(*arguments)
    without_effect = ("engine.micro_batch_size=8", "engine.ema_decay=0.9", "hardware.num_threads=auto")
    without_effect += ("hardware.channels_last=true",)
    refused = [train(*arguments, setting) for setting in without_effect]
    sys.path.remove(str(workspace))
    assert [run.exit_code for run in refused] == [1, 1, 1, 1]
    assert all(setting.partition("=")[0] in run.output for run, setting in zip(refused, without_effect, strict=True))
    assert "engine.micro_batch_size=8 (use null)" in refused[0].output
    assert result.exit_code == 0, result.output
    assert "plain LightningModule" in result.output
    assert "test/loss" in result.metrics


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--cfg", "job", "experiment=vision"]])
def test_help_and_config_do_not_import_torch(workspace: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "leyden.config" in modules
    assert not {"torch", "lightning", "pydantic", "polars"} & modules


def test_data_parallel_on_two_processes(workspace: Path) -> None:
    arguments = ["hardware=ddp", "hardware.accelerator=cpu", "hardware.devices=2", "trainer.max_epochs=2"]
    command = [sys.executable, str(ROOT / "train.py"), "experiment=regression", "hardware.num_threads=1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path.parent for path in workspace.rglob("run.json"))
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["state"] == "finished"
    parallel = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    done = subprocess.run(
        [*command[:-4], "hardware=cpu", "trainer.max_epochs=2"], capture_output=True, text=True, check=True
    )
    (other,) = (path.parent for path in workspace.rglob("run.json") if path.parent != folder)
    single = json.loads((other / "metrics.json").read_text(encoding="utf-8"))
    # The last batch of an epoch has 31 rows, 15 and 16 of them per process, weighted by their number.
    assert parallel == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=vision", "model=vision_mlp"),
        ("experiment=vision", "model=vision_vit", "optim=muon"),
        ("experiment=nlp", "model=nlp_cnn", "optim=sgd", "schedule=constant"),
        ("experiment=regression_diabetes", "model=regression_linear"),
        ("experiment=vision_vit", "model=vision_cnn", "schedule=one_cycle"),
    ],
    ids=" ".join,
)
def test_other_options_of_groups_than_the_experiment_has(train: Callable, arguments: tuple[str, ...]) -> None:
    result = train(*arguments, "debug=fast")
    assert result.exit_code == 0, result.output


def test_what_the_command_line_sets_is_never_dropped(train: Callable) -> None:
    result = train("experiment=vision", "model=vision_mlp", "+model.net.widths=[8]", "debug=fast")
    assert result.exit_code == 1
    assert "There is no key `model.net.widths`" in result.output


def test_run_without_callbacks(train: Callable) -> None:
    result = train("experiment=regression", *SHORT, "callbacks=null")
    assert result.exit_code == 0, result.output
    assert "no checkpoint was kept, so the final weights are tested" in result.output


def test_folder_has_the_name_of_the_run(train: Callable) -> None:
    result = train("experiment=regression", "name=mine", "debug=fast")
    assert result.folder.parent.name == "mine"
