"""The set of any size: the formula, its moments, the same rows each time, batches of little memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.datasets import make_friedman1

from leyden.regression import friedman
from leyden.regression.friedman import FriedmanData, draw_rows, moments


def make(folder: Path, num_rows: int = 3000, **options: object) -> FriedmanData:
    data = FriedmanData(num_rows, 100, cache_dir=str(folder), **options)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    return data


def test_target_is_scikit_learns() -> None:
    x, y = draw_rows(500, 0.0, np.random.default_rng(1))

    class Given(np.random.RandomState):
        def uniform(self, size: tuple[int, int]) -> np.ndarray:  # type: ignore[override]
            return x.astype(np.float64)

    expected = make_friedman1(500, noise=0.0, random_state=Given())[1]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_noise_has_its_deviation() -> None:
    clean, noisy = (draw_rows(50_000, std, np.random.default_rng(1))[1] for std in (0.0, 2.0))
    assert (noisy - clean).std() == pytest.approx(2.0, rel=0.02)


def test_rows_are_the_same_each_time_and_splits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(friedman, "ROWS_AT_A_TIME", 1000)
    first, again = make(tmp_path / "a"), make(tmp_path / "b", seed=7, batch_size=5)
    for split in ("train", "val", "test"):
        assert first.splits[split]["features"].equal(again.splits[split]["features"])
    assert first.num_samples("train") == 3000
    assert not first.splits["val"]["features"].equal(first.splits["test"]["features"])
    assert not make(tmp_path / "a", data_seed=1).splits["val"]["target"].equal(first.splits["val"]["target"])
    assert first.fingerprint()["train"] == again.fingerprint()["train"]


def test_moments_are_those_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(friedman, "ROWS_AT_A_TIME", 700)
    target = make(tmp_path).splits["train"]["target"]
    mean, std = moments(target)
    assert mean == pytest.approx(float(target.double().mean()), rel=1e-9)
    assert std == pytest.approx(float(target.double().std(correction=0)), rel=1e-9)
    assert moments(torch.full((5, 1), 2.0)) == (2.0, 1.0)


def test_features_are_standardised(tmp_path: Path) -> None:
    data = make(tmp_path)
    features = data.transform_batch(data.first_rows(3000), None)["features"]
    torch.testing.assert_close(features.mean(dim=0), torch.zeros(10), atol=0.08, rtol=0)
    torch.testing.assert_close(features.std(dim=0), torch.ones(10), atol=0.05, rtol=0)


def test_inputs_come_from_a_table(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((4, 10))
    pl.DataFrame(rows, schema=[f"x{i}" for i in range(10)]).write_csv(tmp_path / "rows.csv")
    inputs = make(tmp_path).read_inputs(tmp_path / "rows.csv")
    assert inputs.ids == ["1", "2", "3", "4"]
    torch.testing.assert_close(inputs.tensors["features"], torch.from_numpy(rows).float())
