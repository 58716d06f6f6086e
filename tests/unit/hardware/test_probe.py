"""GPUs of made-up machines, from a library that answers as NVIDIA's does."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leyden.hardware import probe
from leyden.hardware.nvml import Gpu, Links, opened, read_gpu, visible_handles
from leyden.hardware.probe import Hardware, probe_hardware, survey_hardware

GIB = 2**30


@dataclass
class Card:
    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = "GPU-0"
    total: int = 80 * GIB
    free: int = 79 * GIB
    busy_pct: int | None = 0
    capability: tuple[int, int] = (8, 0)
    compute_mode: int = 0
    processes: list[int] = field(default_factory=list)
    nvlinks: int = 12
    mig: int | None = 0


class FakeNvml:
    """The functions of nvidia-ml-py that are used, over a list of cards; a handle is a card."""

    class NVMLError(Exception):
        pass

    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(self, *cards: Card, has_driver: bool = True, slices: dict[str, Card] | None = None) -> None:
        self.cards, self.has_driver, self.slices, self.is_open = cards, has_driver, slices or {}, False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("Library Not Found")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def __getattr__(self, question: str) -> Any:
        def known(value: Any) -> Any:
            if value is None:
                raise self.NVMLError("Not Supported")
            return value

        answers = {
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda index: self.cards[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: known(self.slices.get(uuid)),
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=card.total, free=card.free),
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=known(card.busy_pct)),
            "nvmlDeviceGetCudaComputeCapability": lambda card: card.capability,
            "nvmlDeviceGetComputeMode": lambda card: card.compute_mode,
            "nvmlDeviceGetComputeRunningProcesses": lambda card: card.processes,
            "nvmlDeviceGetMigMode": lambda card: (known(card.mig), card.mig),
            "nvmlDeviceGetNvLinkState": lambda card, link: known(1 if link < card.nvlinks else None),
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda card: 4,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda card: 16,
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        }
        assert self.is_open, "the library was asked before nvmlInit or after nvmlShutdown"
        return answers[question]


def cards(count: int = 4) -> list[Card]:
    return [Card(uuid=f"GPU-{index}a") for index in range(count)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets torch see a number of CUDA devices, by NVIDIA's order."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def see(count: int, *names: str) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])

    return see


def test_gpu_as_the_library_tells_it() -> None:
    nvml = FakeNvml(Card(free=20 * GIB, busy_pct=97, processes=[1, 2], capability=(9, 0), compute_mode=3))
    with opened(nvml) as library:
        found = read_gpu(library, nvml.cards[0])
    assert found == Gpu(
        name="NVIDIA A100-SXM4-80GB",
        uuid="GPU-0",
        memory_total_bytes=80 * GIB,
        memory_free_bytes=20 * GIB,
        utilisation_frac=0.97,
        capability=(9, 0),
        compute_mode="exclusive",
        num_processes=2,
    )
    assert not nvml.is_open


def test_what_a_card_does_not_tell_is_none() -> None:
    nvml = FakeNvml(Card(busy_pct=None, compute_mode=7))
    with opened(nvml) as library:
        found = read_gpu(library, nvml.cards[0])
    assert found.utilisation_frac is None
    assert found.compute_mode is None
    assert Gpu("T4").has_bfloat16 is None
    assert Gpu("T4").occupation is None


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu("A", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB, utilisation_frac=0.0), None),
        # A tenth of the memory is the limit: 8 of 80 GiB
        (Gpu("A", memory_total_bytes=80 * GIB, memory_free_bytes=72 * GIB), None),
        (Gpu("A", memory_total_bytes=80 * GIB, memory_free_bytes=71 * GIB), "9.0 of 80.0 GiB in use"),
        (Gpu("A", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB, utilisation_frac=0.1), None),
        (
            Gpu("A", memory_total_bytes=80 * GIB, memory_free_bytes=20 * GIB, utilisation_frac=0.97),
            "60.0 of 80.0 GiB in use, computing 97% of the time",
        ),
        (Gpu("A", compute_mode="exclusive", num_processes=0), None),
        (
            Gpu("A", compute_mode="exclusive", num_processes=1),
            "its compute mode is exclusive, and another process has it",
        ),
        (Gpu("A", compute_mode="prohibited", num_processes=0), "its compute mode is prohibited"),
    ],
)
def test_when_a_gpu_is_busy(gpu: Gpu, words: str | None) -> None:
    assert gpu.occupation == words


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0a", "GPU-1a", "GPU-2a", "GPU-3a"]),
        ("2,0", ["GPU-2a", "GPU-0a"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["GPU-1a"]),  # ends at the first that is none
        ("0,9,1", ["GPU-0a"]),
        ("1,1", []),
        ("GPU-3,GPU-1a", ["GPU-3a", "GPU-1a"]),
        ("GPU-", []),  # means several
    ],
)
def test_cuda_visible_devices(visible: str | None, uuids: list[str]) -> None:
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with opened(FakeNvml(*cards())) as library:
        found = visible_handles(library, environment)
    assert found is not None
    assert [card.uuid for card in found] == uuids


def test_numbers_of_another_order_cannot_be_matched_but_names_can() -> None:
    with opened(FakeNvml(*cards())) as library:
        assert visible_handles(library, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) is None
        found = visible_handles(library, {"CUDA_VISIBLE_DEVICES": "GPU-1a"})
    assert [card.uuid for card in found or ()] == ["GPU-1a"]


def test_slices_of_a_divided_card() -> None:
    part = Card(name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", uuid="MIG-7", total=10 * GIB, free=10 * GIB, mig=None)
    with opened(FakeNvml(Card(mig=1), slices={"MIG-7": part})) as library:
        assert visible_handles(library, {}) is None  # CUDA shows one of its slices, but not which
        assert visible_handles(library, {"CUDA_VISIBLE_DEVICES": "MIG-7"}) == [part]


def test_probe_takes_names_and_states_from_the_library(cuda: Any) -> None:
    cuda(2)
    nvml = FakeNvml(Card(), Card(name="Tesla T4", uuid="GPU-1", free=0))
    found = probe_hardware(nvml=nvml)
    assert found.gpus == ("NVIDIA A100-SXM4-80GB", "Tesla T4")
    assert found.idle_gpus == [0]
    assert found.busy_gpus == "GPU 1 is busy (80.0 of 80.0 GiB in use)"


@pytest.mark.parametrize(
    ("built_for", "is_refused"), [("13.0", False), ("12.8", False), ("13.2", False), ("14.0", True)]
)
def test_driver_that_is_too_old_for_torch(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, built_for: str, is_refused: bool
) -> None:
    """A driver takes any minor version of its own CUDA, here 13, and all older ones."""
    cuda(4)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found = probe_hardware(nvml=FakeNvml(*cards()))
    assert found.idle_gpus == ([] if is_refused else [0, 1, 2, 3])
    refusal = found.states[0].refusal
    assert (refusal is not None and "(for CUDA 13.0) is too old for this torch" in refusal) == is_refused


@pytest.mark.parametrize("nvml", [FakeNvml(has_driver=False), FakeNvml(*cards(3))], ids=["no driver", "disagrees"])
def test_where_the_library_cannot_tell_torch_names_the_gpus(cuda: Any, nvml: FakeNvml) -> None:
    cuda(2, "AMD Instinct MI300X", "AMD Instinct MI300X")
    found = probe_hardware(nvml=nvml)
    assert found.gpus == ("AMD Instinct MI300X",) * 2
    assert found.states == ()
    assert found.idle_gpus == [0, 1]  # not known to be busy


def test_indices_mean_the_same_to_all(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(4)
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    probe_hardware(nvml=FakeNvml(*cards()))
    assert probe.os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_survey(cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda(1)
    monkeypatch.setattr(probe, "_can_pin", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    (tmp_path / "run/mps").mkdir(parents=True)
    (tmp_path / "run/mps/control").touch()
    found = survey_hardware(tmp_path, FakeNvml(Card(nvlinks=12)))
    assert found.links == (Links(pcie_generation=4, pcie_width=16, num_nvlinks=12, mig_enabled=False),)
    assert (found.driver, found.driver_cuda) == ("580.65.06", "13.0")
    assert found.cudnn == "92400"
    assert found.mps_server
    assert found.can_pin_memory
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert found.torch == torch.__version__


def test_survey_without_gpu() -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    found = survey_hardware()
    assert (found.links, found.driver, found.driver_cuda, found.cudnn) == ((), None, None, None)
    assert not found.can_pin_memory
    assert not found.mps_server


def test_real_library_is_asked_and_answers_as_expected_where_there_is_no_driver() -> None:
    import pynvml

    for name in (
        *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"),
        *("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"),
        *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetComputeMode", "nvmlDeviceGetComputeRunningProcesses"),
        *("nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkGeneration"),
        *("nvmlDeviceGetMaxPcieLinkWidth", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion"),
        *("NVML_COMPUTEMODE_DEFAULT", "NVML_COMPUTEMODE_PROHIBITED", "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS"),
        *("NVML_NVLINK_MAX_LINKS", "NVMLError"),
    ):
        assert hasattr(pynvml, name), name
    with opened() as library:
        assert (library is None) == (torch.cuda.device_count() == 0)


def test_probe_starts_no_device_and_is_quick() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("something in this process has started CUDA")
    probe_hardware()
    start = time.process_time()
    probe_hardware()
    assert time.process_time() - start < 0.1
    assert not torch.cuda.is_initialized()


def test_hardware_can_be_made_without_states() -> None:
    bare = Hardware(("T4",), False, "Xeon", 2)
    assert bare.idle_gpus == [0]
    assert dataclasses.replace(bare, states=(Gpu("T4", utilisation_frac=1.0),)).idle_gpus == []
