"""Devices: what is asked for and not there, what somebody else uses, and number formats that a device lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from field_data import PICTURES, TEXTS, table_rows, text_rows, write_csv, write_pictures

from leyden.data.datamodule import DataModule
from leyden.entry import compose_config
from leyden.errors import ConfigError
from leyden.hardware.nvml import Gpu
from leyden.hardware.probe import Hardware
from leyden.launch.job import Job
from leyden.wiring import build_data

NO_GPU = Hardware((), False, "Xeon", 2)
ONE_GPU = Hardware(("NVIDIA A10G",), False, "Xeon", 8)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], None]:
    """Lets a run find other hardware, and makes it a failure to touch the data."""

    def touched(*_: object) -> None:
        raise AssertionError("the data was touched")

    def set_hardware(hardware: Hardware) -> None:
        monkeypatch.setattr("leyden.runner.probe_hardware", lambda: hardware)

    monkeypatch.setattr(DataModule, "prepare_data", touched)
    monkeypatch.setattr(DataModule, "setup", touched)
    return set_hardware


def refused(result: Any, workspace: Path, *words: str) -> None:
    """Asserts one message, exit code 1, and that nothing is left in the folder."""
    assert result.exit_code == 1, result.output
    lines = [line for line in result.output.splitlines() if "Error" in line]
    assert len(lines) == 1, result.output
    assert "HardwareError" in lines[0]
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.output
    assert not list(workspace.iterdir())


# ---- DEV-01: a GPU is asked for and there is none ----------------------------------------------------------------


@pytest.mark.parametrize("option", ["gpu", "mps"])
def test_dev_01_no_gpu(train: Callable, workspace: Path, machine: Callable, option: str) -> None:
    machine(NO_GPU)
    result = train("experiment=vision", f"hardware={option}")
    wanted = f"`hardware.accelerator` is {option}, but there is none here. Found: CPU Xeon (2 cores)."
    refused(result, workspace, wanted, "Use hardware=cpu")


def test_dev_01_folders_of_other_runs_stay(train: Callable, workspace: Path, machine: Callable) -> None:
    machine(NO_GPU)
    other = workspace / "outputs" / "vision" / "other"
    other.mkdir(parents=True)
    assert train("experiment=vision", "hardware=gpu").exit_code == 1
    assert list((workspace / "outputs" / "vision").iterdir()) == [other]


def test_dev_01_folder_of_the_users_choice(train: Callable, workspace: Path, machine: Callable) -> None:
    machine(NO_GPU)
    (workspace / "mine").mkdir()
    assert train("experiment=vision", "hardware=gpu", "hydra.run.dir=mine/run").exit_code == 1
    assert [path.name for path in workspace.iterdir()] == ["mine"]
    (workspace / "mine" / "run").mkdir()
    (workspace / "mine" / "run" / "notes.txt").touch()
    assert train("experiment=vision", "hardware=gpu", "hydra.run.dir=mine/run").exit_code == 1
    assert (workspace / "mine" / "run" / "notes.txt").is_file()


def test_dev_01_job_of_a_sweep_keeps_its_log(train: Callable, machine: Callable) -> None:
    machine(NO_GPU)
    result = train("-m", "experiment=vision", "hardware=gpu", "seed=0,1")
    assert result.exit_code != 0
    assert result.folders
    assert "there is none here" in (result.folders[0] / "train.log").read_text(encoding="utf-8")


# ---- DEV-02: more devices than there are -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("4", "`hardware.devices` must be between 1 and 1 for gpu on this machine, got 4. Use hardware.devices=auto."),
        ("[3]", "`hardware.devices` must be a list of different indices out of [0], got [3]."),
        ("3", "`hardware.devices` must be between 1 and 1 for gpu on this machine, got 3."),
    ],
)
def test_dev_02_more_devices_than_there_are(
    train: Callable, workspace: Path, machine: Callable, devices: str, words: str
) -> None:
    machine(ONE_GPU)
    refused(train("experiment=vision", "hardware=gpu", f"hardware.devices={devices}"), workspace, words)


def test_dev_02_number_as_text_is_neither_a_count_nor_an_index(
    train: Callable, workspace: Path, machine: Callable
) -> None:
    machine(ONE_GPU)
    result = train("experiment=vision", "hardware=gpu", "hardware.devices='0'")
    assert result.exit_code == 1
    words = "`hardware.devices` must be 'auto' or 'idle' or a valid integer or a list, got '0'."
    assert words in result.output
    assert not list(workspace.iterdir())


# ---- DEV-04: a card that somebody else uses ----------------------------------------------------------------------


def shared_machine(*used_gib: int, mode: Any = "default") -> Hardware:
    gib = 2**30
    states = tuple(
        Gpu("NVIDIA A10G", None, 24 * gib, (24 - used) * gib, None, (8, 6), mode, int(used > 0)) for used in used_gib
    )
    return Hardware(("NVIDIA A10G",) * len(states), False, "Xeon", 8, states)


@pytest.mark.parametrize(
    ("used_gib", "chosen"),
    [
        ((20, 0), "Hardware: GPU 1 NVIDIA A10G (idle; GPU 0 is busy (20.0 of 24.0 GiB in use)"),
        ((20, 21), "Hardware: GPU 0 NVIDIA A10G (the first CUDA device found; GPU 0 is busy (20.0 of 24.0 GiB in use)"),
    ],
)
def test_dev_04_busy_card_is_not_taken_silently(
    train: Callable, machine: Callable, monkeypatch: pytest.MonkeyPatch, used_gib: tuple[int, ...], chosen: str
) -> None:
    def stop(*_: object) -> None:
        raise ConfigError("here the run would begin")

    machine(shared_machine(*used_gib))
    monkeypatch.setattr("leyden.runner.assemble", stop)
    result = train("experiment=vision", "hardware=auto")
    assert "here the run would begin" in result.output
    assert chosen in result.output
    assert chosen.removeprefix("Hardware: ") in result.record["hardware"]


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=0,1")])
def test_dev_04_several_idle_cards_are_taken_by_a_process_each(
    train: Callable, machine: Callable, monkeypatch: pytest.MonkeyPatch, sweep: tuple[str, ...]
) -> None:
    taken: list[Any] = []

    def stop(job: Job, count: int) -> None:
        taken.append((job.config["hardware"]["devices"], job.config["hardware"]["strategy"], count))
        raise ConfigError("here the processes would begin")

    machine(shared_machine(20, 0, 0))
    monkeypatch.setattr("leyden.runner.run_processes", stop)
    result = train(*sweep, "experiment=vision", "hardware=auto")
    # All processes have to take the same cards, whenever they look
    assert set(map(str, taken)) == {"([1, 2], 'ddp', 2)"}, result.output


def test_dev_04_exclusive_card(train: Callable, workspace: Path, machine: Callable) -> None:
    machine(shared_machine(20, 0, mode="exclusive"))
    result = train("experiment=vision", "hardware=gpu", "hardware.devices=[0]")
    words = "needs GPU 0 NVIDIA A10G, but its compute mode is exclusive, and another process has it. Idle: [1]."
    refused(result, workspace, words, "Use hardware.devices=[1].")


# ---- settings that go together with others only ------------------------------------------------------------------


def test_cudnn_benchmark_beside_deterministic_algorithms(train: Callable, machine: Callable) -> None:
    machine(ONE_GPU)
    result = train("experiment=vision", "hardware=gpu", "hardware.cudnn_benchmark=true")
    assert result.exit_code == 1
    assert "Set engine.deterministic=false, or hardware.cudnn_benchmark=false." in result.output


def test_setting_of_a_gpu_on_the_cpu(train: Callable, workspace: Path, machine: Callable) -> None:
    machine(NO_GPU)
    result = train("experiment=vision", "hardware.memory_fraction=0.5")
    refused(result, workspace, "`hardware.memory_fraction` is 0.5, but this run is on cpu")


# ---- DEV-05: float64 from tables, which Apple's GPU does not have ------------------------------------------------


def write_inputs() -> None:
    rows = table_rows(40)
    frame = polars.DataFrame(rows, schema=["x1", "x2", "y"], orient="row")
    assert frame.schema["x1"] == polars.Float64
    frame.with_columns(count=polars.int_range(len(frame), dtype=polars.Int8)).write_parquet("table.parquet")
    write_pictures("pictures", {"cats": 12, "dogs": 12})
    write_csv("texts.csv", ("text", "label"), text_rows(40))


@pytest.mark.parametrize(
    "overrides",
    [("experiment=regression", "data=table", "data.path=table.parquet", "data.target=y"), PICTURES, TEXTS],
    ids=["table", "pictures", "texts"],
)
def test_dev_05_batches_are_float32_or_int64(workspace: Path, overrides: tuple[str, ...]) -> None:
    write_inputs()
    data = build_data(compose_config(list(overrides)))
    assert isinstance(data, DataModule)
    batch = data.transform_batch(data.first_rows(4), None)
    assert {tensor.dtype for tensor in batch.values()} <= {torch.float32, torch.int64}
    assert torch.float32 in {tensor.dtype for tensor in batch.values()} or "experiment=nlp" in overrides
