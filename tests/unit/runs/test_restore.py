"""Checkpoints from anywhere: found, read as plain values, and never allowed to call more than a model needs."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.data import batch_transforms, filters, mixup
from leyden.errors import ConfigError, DataError
from leyden.regression.data import LineData
from leyden.regression.task import RegressionTask
from leyden.runs.restore import IMAGE_CHANGES, Checkpoint, check_targets, find_checkpoint, load_checkpoint, restore

CONFIG: dict[str, Any] = {
    "data": {"_target_": "leyden.regression.data.LineData", "batch_size": 3},
    "model": {
        "_target_": "leyden.regression.task.RegressionTask",
        "target_mean": None,
        "target_std": None,
        "net": {"_target_": "leyden.regression.nets.Linear", "num_features": 1, "num_targets": 1},
    },
    "optim": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
    "schedule": {"_target_": "leyden.engine.schedule.Constant"},
    "engine": {"precision": "32-true"},
    "hardware": {"channels_last": "auto"},
}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {key: {**CONFIG[key], **sections.get(key, {})} for key in CONFIG} | {
        key: value for key, value in sections.items() if key not in CONFIG
    }


def build() -> tuple[RegressionTask, LineData]:
    """A task and data as a run would have left them."""
    from functools import partial

    from leyden.engine.schedule import Constant
    from leyden.regression.nets import Linear

    torch.manual_seed(1)
    data = LineData(batch_size=3)
    data.setup()
    task = RegressionTask(
        Linear(1, 1), partial(torch.optim.SGD, lr=0.1), Constant(), data.facts["target_mean"], data.facts["target_std"]
    )
    task.setup()
    return task, data


def write(path: Path, **changes: Any) -> Path:
    task, data = build()
    content = {
        "state_dict": task.state_dict(),
        "LineData": data.state_dict(),
        "leyden": {"config": CONFIG, "metrics": {"val/loss": 0.5}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: value for key, value in (content | changes).items() if value is not None}, path)
    return path


# ---- finding and reading -------------------------------------------------------------------------------------


def test_best_comes_before_last(tmp_path: Path) -> None:
    last = write(tmp_path / "checkpoints" / "last.ckpt")
    assert find_checkpoint(tmp_path) == last
    best = write(tmp_path / "checkpoints" / "best.ckpt")
    assert find_checkpoint(tmp_path) == best
    assert find_checkpoint(last) == last


def test_nothing_there_is_named_with_the_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        find_checkpoint(Path("nope"))
    assert str(caught.value) == f"There is no run folder or checkpoint at {tmp_path / 'nope'}."


def test_checkpoints_below_a_folder_are_listed(tmp_path: Path) -> None:
    found = write(tmp_path / "2026" / "checkpoints" / "best.ckpt")
    with pytest.raises(DataError) as caught:
        find_checkpoint(tmp_path)
    assert f"There is no run folder or checkpoint at {tmp_path}. Checkpoints below it: {found}." in str(caught.value)


def test_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a b=c é" / "x.ckpt")
    checkpoint = load_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.config == CONFIG
    assert checkpoint.metrics == {"val/loss": 0.5}
    assert checkpoint.data_state == build()[1].state_dict()
    assert set(checkpoint.state_dict) == set(build()[0].state_dict())


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path} does not load as a checkpoint, so it is damaged: ")


def test_file_of_another_program(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", leyden=None)
    with pytest.raises(DataError) as caught:
        load_checkpoint(path)
    assert str(caught.value) == f"{path} was not written by Leyden: it has no config."


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(Trap(touched)))
    assert touched.exists()  # so the trap works
    touched.unlink()
    path = write(tmp_path / "x.ckpt", trap=Trap(touched))
    with pytest.raises(DataError, match="does not load as a checkpoint"):
        load_checkpoint(path)
    assert not touched.exists()


# ---- what may be called --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "builtins.exec",
        "builtins.open",
        "pathlib.Path",
        "shutil.rmtree",
        "importlib.import_module",
        "torch.load",
        "torch.hub.load",
        "leyden.wiring.instantiate",
        "hydra.utils.instantiate",
        "hydra.utils.get_method",
        "leyden.runs.folder.write_atomic",
        "leyden.runs.restore.restore",
        "leyden.data.datamodule.DataModule.load_state_dict",
        "lightning.pytorch.LightningDataModule.from_datasets",
        "lightning.pytorch.LightningModule.load_from_checkpoint",
        "lightning.pytorch.Trainer",
        "torch.nn.Module.apply",
        "torch.nn.init.ones_",
        "functools.partial",
        "leyden.data.batch_transforms.math.sqrt",
        "leyden.data.batch_transforms.compute_affine_theta",
        "leyden.data.filters.convolve",
        "leyden.data.filters.math.exp",
        "leyden.data.filters.Annotated",
        "leyden.data.mixup.draw_beta",
        "leyden.data.image_changes.apply_filters",
        "leyden.data.image_changes.BatchChange",
    ],
)
def test_anything_but_parts_of_a_model_is_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_targets({"a": [{"b": {"_target_": target}}]}, "model")
    assert str(caught.value) == (
        f"`model.a[0].b._target_` of this checkpoint is '{target}', which is neither a network, a datamodule, a "
        "schedule nor an optimiser, so it is not called. Rebuild the run from its source instead."
    )


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.Linear",
        "torch.nn.Sequential",
        "torchvision.models.resnet18",
        "torchvision.models.ResNet",
        "torch.optim.AdamW",
        "leyden.engine.optim.Muon",
        "leyden.engine.schedule.OneCycle",
        "leyden.data.batch_transforms.RandomAffine",
        "leyden.vision.data.ImageFolder",
        "leyden.vision.task.VisionTask",
        "leyden.nlp.nets.NgramBag",
    ],
)
def test_parts_of_a_model_are_allowed(target: str) -> None:
    assert check_targets({"a": [{"_target_": target, "x": 1}]}, "model") is None  # type: ignore[func-returns-value]


def test_each_change_of_images_is_allowed_by_name() -> None:
    found = {
        value
        for module in (batch_transforms, filters, mixup)
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    assert found == IMAGE_CHANGES
    for change in found:
        check_targets({"_target_": f"{change.__module__}.{change.__name__}"}, "data")


def test_class_put_beside_the_changes_of_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Other", (filters.Sharpen,), {"__module__": filters.__name__})
    monkeypatch.setattr(filters, "Other", other, raising=False)
    with pytest.raises(ConfigError, match="so it is not called"):
        check_targets({"_target_": "leyden.data.filters.Other"}, "data.filters.x")


def test_name_that_leads_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"there is nothing to build at 'nowhere\.Net'"):
        check_targets({"_target_": "nowhere.Net"}, "model")


def restored(config: dict[str, Any], facts: dict[str, Any] | None = None) -> Any:
    task, data = build()
    state = data.state_dict()
    return restore(
        Checkpoint(Path("x.ckpt"), config, task.state_dict(), state | {"facts": facts or state["facts"]}, {})
    )


@pytest.fixture
def victim(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file that must not come to be, and a block that would write it."""
    path = tmp_path / "written"
    target = {"_target_": "pathlib.Path", "_args_": [str(path)]}
    return path, {"_target_": "leyden.runs.folder.write_atomic", "path": target, "text": "x"}


def test_victim_would_be_written(victim: tuple[Path, dict[str, Any]]) -> None:
    from hydra.utils import instantiate

    path, block = victim
    instantiate(block)
    assert path.exists()


@pytest.mark.parametrize("section", ["data", "model", "optim", "schedule"])
def test_block_in_a_section_is_not_called(victim: tuple[Path, dict[str, Any]], section: str) -> None:
    path, block = victim
    with pytest.raises(ConfigError, match=rf"`{section}\.seed\._target_` of this checkpoint is 'leyden\.runs\.folder"):
        restored(changed(**{section: {"seed": block}}))
    assert not path.exists()


def test_block_behind_an_interpolation_is_not_called(victim: tuple[Path, dict[str, Any]]) -> None:
    path, block = victim
    with pytest.raises(
        ConfigError, match=r"`model\.net` of this checkpoint is '\$\{evil\}', which could lead to anything"
    ):
        restored(changed(model={"net": "${evil}"}, evil=block))
    assert not path.exists()


def test_block_among_the_facts_is_not_called(victim: tuple[Path, dict[str, Any]]) -> None:
    path, block = victim
    facts = {"target_mean": block, "target_std": [2.0], "num_features": 1, "num_targets": 1}
    with pytest.raises(ConfigError, match=r"`facts\.target_mean\._target_` of this checkpoint is"):
        restored(CONFIG, facts)
    assert not path.exists()


# ---- a whole run ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_task_and_preprocessing_come_back(tmp_path: Path) -> None:
    task, data = build()
    again, again_data = restore(load_checkpoint(write(tmp_path / "x.ckpt")))
    assert isinstance(again, RegressionTask)
    assert not again.training
    assert again(data.splits["test"]).equal(task.eval()(data.splits["test"]))
    assert again_data.splits == {}  # no data was read
    assert again_data.state_dict() == data.state_dict()


def test_plain_module_is_not_restored() -> None:
    config = changed()
    config["model"] = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    with pytest.raises(
        ConfigError, match=r"x\.ckpt holds a plain Lightning module; only Leyden's tasks are restored\."
    ):
        restored(config)
