"""`data=dataset`: a user's own Dataset, from a module in the current folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from leyden.callbacks.trace import read_trace

MODULE = '''
import torch
from torch.utils.data import Dataset, IterableDataset


class Bars(Dataset):
    """Bright bars across or along a noisy square; mirrored at random."""

    classes = ["across", "along"]

    def __init__(self, n=120, seed=0, bad=None):
        self.n, self.seed, self.bad = n, seed, bad

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError("cannot identify image file 'x.jpg'")
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        image = torch.randint(100, (1, 8, 8), generator=generator, dtype=torch.uint8)
        at = int(torch.randint(8, (), generator=generator))
        image[(0, slice(None), at) if i % 2 else (0, at)] = 255
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), i % 2


class BarStream(IterableDataset):
    def __iter__(self):
        bars = Bars()
        return (bars[i] for i in range(len(bars)))
'''
BASE = (
    "experiment=vision",
    "data=dataset",
    "data.batch_size=16",
    "model.net.widths=[8,16]",
    "schedule=constant",
    "schedule.warmup_frac=0.0",
    "trainer.max_epochs=2",
    "hardware.num_threads=1",
    "logger=null",
)
BARS = ("data.train._target_=field_bars.Bars", "+data.test._target_=field_bars.Bars", "+data.test.seed=1")


@pytest.fixture
def bars(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "field_bars.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.delitem(sys.modules, "field_bars", raising=False)  # of another folder


@pytest.mark.usefixtures("bars")
def test_own_dataset_is_learned_and_gives_the_same_with_any_number_of_workers(train: Callable) -> None:
    runs = [train(*BASE, *BARS, f"data.num_workers={n}", "trainer.max_epochs=4") for n in (0, 1, 2)]
    for run in runs:
        assert run.exit_code == 0, run.output
    assert "Batches from worker processes: 2 read the samples of Bars." in runs[2].output
    assert runs[0].metrics["test/accuracy"] > 0.9
    states = [torch.load(r.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for r in runs]
    for state in states[1:]:
        assert all(torch.equal(value, state[name]) for name, value in states[0].items())


@pytest.mark.usefixtures("bars")
def test_own_dataset_resumes_within_an_epoch(train: Callable) -> None:
    trace = "+callbacks.trace._target_=leyden.callbacks.trace.Trace"
    straight = train(*BASE, *BARS, trace)
    stopped = train(*BASE, *BARS, trace, "trainer.max_steps=11")
    resumed = train(f"resume={stopped.folder}", "trainer.max_steps=-1")
    assert resumed.exit_code == 0, resumed.output
    rows = read_trace(straight.folder / "trace.jsonl")
    assert read_trace(stopped.folder / "trace.jsonl") == rows
    for epoch in (0, 1):
        assert sorted(s for row in rows if row["epoch"] == epoch for s in row["samples"]) == list(range(120))


@pytest.mark.usefixtures("bars")
def test_sample_that_cannot_be_read_ends_the_run_and_is_named(train: Callable) -> None:
    run = train(*BASE, *BARS, "+data.train.bad=50")
    assert run.exit_code == 1
    expected = "DataError: Sample 50 of the train data (Bars) could not be read: OSError: cannot identify image file"
    assert expected in run.output
    assert "Traceback" not in run.output
    assert run.record["state"] == "failed"


@pytest.mark.usefixtures("bars")
def test_stream_says_in_one_warning_what_does_not_hold(train: Callable) -> None:
    stream = ("data.train._target_=field_bars.BarStream", "test=false", "data.facts={num_classes: 2}")
    run = train(*BASE, *stream, "data.batches_per_epoch=5")
    assert run.exit_code == 0, run.output
    assert run.output.count("is a stream, so its order is its own") == 1
    saved = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2 * 5


@pytest.mark.usefixtures("bars")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (BARS[:1], "`test` is true, but Bars has no test data. Give data.test, or set test=false."),
        ((*BARS, "+data.train.n=0"), "The train split (Bars) is empty."),
        ((*BARS, "data.residency=device"), "`data.residency` is device, but samples of a Dataset are read by workers."),
        (
            ("data.train._target_=field_bars.BarStream", "test=false"),
            "`data.train` (BarStream) does not say how long it is. Set data.batches_per_epoch.",
        ),
        ((*BARS, "+data.train.size=3"), "There is no key `data.train.size`"),
    ],
    ids=["no test", "empty", "residency", "no length", "unknown argument"],
)
def test_what_is_wrong_is_said_before_training(train: Callable, changes: tuple[str, ...], message: str) -> None:
    run = train(*BASE, *changes)
    assert run.exit_code == 1
    assert message in run.output


@pytest.mark.parametrize("experiment", ["vision", "nlp"])
def test_residency_changes_no_bit(train: Callable, experiment: str) -> None:
    short = ("trainer.max_epochs=2", "trainer.limit_train_batches=6", "hardware.num_threads=1", "logger=null")
    states, orders = {}, set()
    for residency in ("host", "device", "mmap", "workers"):
        run = train(f"experiment={experiment}", *short, f"data.residency={residency}")
        assert run.exit_code == 0, run.output
        assert "Batches from " in run.output
        orders.add((run.folder / "order.log").read_text(encoding="utf-8"))
        states[residency] = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert len(orders) == 1
    lines = orders.pop().splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    assert len({line.split()[-1] for line in lines}) == 2  # an order of its own for each epoch
    for residency, state in states.items():
        assert all(torch.equal(value, state[name]) for name, value in states["host"].items()), residency


@pytest.mark.usefixtures("bars")
def test_cache_of_an_own_dataset_reads_each_sample_once(train: Callable, workspace: Path) -> None:
    changes = ("+data.train.seed=3", "data.cache=true", "data.num_workers=1")
    first = train(*BASE, *BARS, *changes)
    assert first.exit_code == 0, first.output
    assert "and kept in data/cache/DatasetData-" in first.output
    second = train(*BASE, *BARS, *changes)
    assert "Data from the cache data/cache/DatasetData-" in second.output
    assert "Batches from disk" in second.output
    assert second.metrics == first.metrics
    (workspace / "field_bars.py").write_text(MODULE + "# changed\n", encoding="utf-8")
    assert "and kept in" in train(*BASE, *BARS, *changes, "trainer.max_epochs=1").output


def test_cache_gives_the_run_without(train: Callable) -> None:
    short = ("experiment=nlp", "trainer.max_epochs=1", "trainer.limit_train_batches=6", "logger=null")
    plain, first, second = (train(*short, f"data.cache={cache}") for cache in ("false", "true", "true"))
    assert second.exit_code == 0, second.output
    assert "Data from the cache data/cache/LanguageNames-" in second.output
    assert plain.metrics == first.metrics == second.metrics
