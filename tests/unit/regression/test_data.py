"""Regression data: the tables that come with Leyden, any other table, and what is said about cells that do not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from data_contract import DataModuleContract
from sklearn.datasets import load_diabetes

from leyden.data.datamodule import DataModule
from leyden.data.splits import split_rows
from leyden.errors import DataError
from leyden.regression.data import AutoMpg, Diabetes, LineData, TableData


def write_test_inputs(data: DataModule, folder: Path) -> Path:
    """The test rows of a table without its targets."""
    assert isinstance(data, TableData)
    path = folder / "inputs.csv"
    data._split_frames()["test"].drop(data.targets).write_csv(path)
    return path


class TestAutoMpg(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return AutoMpg(batch_size=50, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_test_inputs(data, folder)

    def test_rows_and_columns(self, data: DataModule) -> None:
        # 392 cars; round(392 * 0.15) = 59, round(392 * 0.2) = 78
        assert [data.num_samples(split) for split in ("train", "val", "test")] == [255, 59, 78]
        assert data.facts["num_features"] == 9  # six numbers and three origins
        assert data.facts["feature_names"][-3:] == ["origin=1", "origin=2", "origin=3"]
        assert data.describe() == "AutoMpg"
        # The whole table's mean is 23.4459 miles per gallon (published with the data set).
        rows = torch.cat([data.splits[split]["target"] for split in ("train", "val", "test")])
        assert float(rows.double().mean()) == pytest.approx(23.4459, abs=1e-4)


class TestDiabetes(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return Diabetes(batch_size=64, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_test_inputs(data, folder)

    def test_targets_are_scikit_learns(self, data: DataModule) -> None:
        rows = torch.cat([data.splits[split]["target"] for split in ("train", "val", "test")])
        assert sorted(rows.flatten().tolist()) == sorted(load_diabetes().target.tolist())
        assert data.facts["num_features"] == 10
        assert data.describe() == "Diabetes"


class TestLineData(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return LineData(batch_size=2, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_test_inputs(data, folder)

    def test_three_points_beyond_the_training_points(self, data: DataModule) -> None:
        assert data.splits["train"]["target"].flatten().tolist() == [2.0, 4.0, 6.0]
        assert data.splits["test"]["target"].flatten().tolist() == [8.0, 10.0, 12.0]
        # x is standardised by 1, 2, 3: mean 2, variance 2/3
        assert data.splits["test"]["features"].flatten().tolist() == pytest.approx(
            [2 / (2 / 3) ** 0.5, 3 / (2 / 3) ** 0.5, 4 / (2 / 3) ** 0.5]
        )
        assert data.facts["target_mean"] == [4.0]
        assert data.facts["target_std"] == pytest.approx([(8 / 3) ** 0.5])
        probes = data.probes()
        assert probes is not None
        assert probes.ids == ["4.0"]
        assert probes.tensors["features"].equal(data.splits["test"]["features"][:1])
        assert data.val_dataloader() == []


class TestTable(DataModuleContract):
    """Numbers and a category, two targets, missing values, the test in a file of its own."""

    def build(self, folder: Path, seed: int) -> DataModule:
        columns = {
            "size": [str(10 + row) if row % 9 else "" for row in range(40)],
            "kind": [("a", "b", "")[row % 3] for row in range(40)],
            "price": list(range(40)),
            "rent": [row * row for row in range(40)],
        }
        pl.DataFrame(columns).write_csv(folder / "prices.csv")
        test = {"size": [77.5, None], "kind": ["b", "unseen"], "price": [5, 6], "rent": [7, 8]}
        pl.DataFrame(test).write_csv(folder / "test.csv")
        return TableData(
            str(folder / "prices.csv"),
            ["price", "rent"],
            impute="mean",
            test_path=str(folder / "test.csv"),
            batch_size=7,
            seed=seed,
        )

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        return write_test_inputs(data, folder)

    def test_columns(self, data: DataModule) -> None:
        assert data.facts["feature_names"] == ["size", "kind=", "kind=a", "kind=b"]
        assert data.facts["num_targets"] == 2
        # The missing size is the mean, which is 0 once standardised; the unseen kind has no column.
        assert data.splits["test"]["features"][1].tolist() == [0.0, 0.0, 0.0, 0.0]
        assert data.splits["test"]["features"][0, 1:].tolist() == [0.0, 0.0, 1.0]
        assert data.splits["test"]["target"].tolist() == [[5.0, 7.0], [6.0, 8.0]]


def write(folder: Path, content: str, name: str = "t.csv") -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)


def numbered(num_rows: int, header: str = "x,kind,y", changes: dict[int, str] | None = None) -> str:
    """Rows `row,k0|k1,2*row`, counted from 1; `changes` replaces some of them."""
    rows = [(changes or {}).get(row, f"{row},k{row % 2},{2 * row}") for row in range(1, num_rows + 1)]
    return "\n".join([header, *rows]) + "\n"


def message_of(data: DataModule) -> str:
    with pytest.raises(DataError) as caught:
        data.setup()
    return str(caught.value)


def test_features_are_standardised_by_the_training_rows(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(30))
    data = TableData(path, "y", features=["x"])
    data.setup()
    train = data.splits["train"]["features"].double()
    assert float(train.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(train.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    rows = split_rows([(str(row),) for row in range(1, 31)], 0.15, 0.2, 0)["train"]
    xs = torch.tensor(rows, dtype=torch.float64) + 1
    assert data.encoder.means == pytest.approx([float(xs.mean())])
    assert data.facts["target_mean"] == pytest.approx([2 * float(xs.mean())])
    assert data.facts["target_std"] == pytest.approx([2 * float(xs.std(correction=0))])


def test_target_that_never_changes_is_not_divided_by_zero(tmp_path: Path) -> None:
    data = TableData(write(tmp_path, "x,y\n" + "".join(f"{x},5\n" for x in range(10))), "y")
    data.setup()
    assert data.facts["target_std"] == [1.0]


def test_rows_with_equal_inputs_stay_together(tmp_path: Path) -> None:
    """The target is no part of the comparison: equal inputs with different answers leak as well."""
    path = write(tmp_path, "x,y\n" + "".join(f"{row % 6},{row}\n" for row in range(24)))
    data = TableData(path, "y")
    data.setup()
    homes: dict[float, set[str]] = {}
    for split, tensors in data.splits.items():
        for target in tensors["target"].flatten().tolist():
            homes.setdefault(target % 6, set()).add(split)
    assert len(homes) == 6
    assert all(len(splits) == 1 for splits in homes.values())


def test_files_of_their_own_for_validation_and_test(tmp_path: Path) -> None:
    data = TableData(
        write(tmp_path, numbered(10)),
        "y",
        val_path=write(tmp_path, numbered(3), "val.csv"),
        test_path=write(tmp_path, numbered(4), "test.csv"),
    )
    data.setup()
    assert [data.num_samples(split) for split in ("train", "val", "test")] == [10, 3, 4]
    assert data.splits["test"]["target"].flatten().tolist() == [2.0, 4.0, 6.0, 8.0]


def test_validation_may_be_empty_only_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(10))
    data = TableData(path, "y", val_frac=0.0)
    data.setup()
    assert data.num_samples("val") == 0
    message = message_of(TableData(path, "y", val_frac=0.01))
    assert f"The val split of TableData ({path}) is empty." in message
    assert "data.val_frac, data.test_frac" in message


def test_unseen_categories_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test = write(tmp_path, "x,kind,y\n1,zz,2\n2,zz,3\n3,k0,1\n", "test.csv")
    data = TableData(write(tmp_path, numbered(10)), "y", val_frac=0.0, test_path=test)
    data.setup()
    assert f"{test} (test rows): column kind has values that no training row has: {{'zz': 2}}" in caplog.text


def test_numbers_may_be_categories(tmp_path: Path) -> None:
    data = TableData(write(tmp_path, numbered(20)), "y", features=["x"], categorical=["x"], val_frac=0.0, test_frac=0.2)
    data.setup()
    assert data.facts["num_features"] == 16
    assert data.splits["train"]["features"].sum(dim=1).tolist() == [1.0] * 16


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        (numbered(9), {"target": "z"}, "there is no column `z` (data.target). Columns: x, kind, y."),
        (numbered(9), {"features": ["x", "q"]}, "there is no column `q` (data.features). Columns: x, kind, y."),
        (numbered(9), {"categorical": ["q"]}, "there is no column `q` (data.categorical). Columns: x, kind, y."),
        (
            numbered(9),
            {"features": ["x", "y"]},
            "`data.features` and `data.target` both have y: the answer would be an input.",
        ),
        (numbered(20), {"features": []}, "there is no column to learn from. List some in data.features."),
        ("x,kind,y\n", {}, "has a header but no rows."),
        (numbered(9), {}, "The val split of {path} has 1 row, but R2 needs at least 2. Add rows, or change the sizes"),
        ("x,y\n" + "1,2\n" * 5, {}, "The train split of TableData"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, content: str, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path, content)
    assert words.format(path=path) in message_of(TableData(**({"path": path, "target": "y"} | changes)))


@pytest.mark.parametrize("split_seed", range(3))
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Row numbers are those of the file, counted below its header, whichever split the row falls in.
        ({17: "n/a,k1,3"}, "column `x` has 1 value(s) that are not numbers (row 17: 'n/a'). Clean them, or add x to"),
        (
            {3: ",k1,3", 18: "inf,k1,3"},
            "missing or infinite values in `x` (2 of 20: rows 3, 18). Fill them in, or use data.impute=mean",
        ),
        ({5: "5,,3"}, "missing or infinite values in `kind` (1 of 20: row 5)."),
        ({7: "7,k1,?"}, "column `y` has 1 value(s) that are not numbers (row 7: '?'). A target must be a number."),
        (
            {2: "2,k0,", 19: "19,k1,inf"},
            "the target `y` is missing or infinite in 2 row(s) (rows 2, 19). Remove these rows.",
        ),
    ],
)
def test_cells_that_do_not_fit(tmp_path: Path, changes: dict[int, str], words: str, split_seed: int) -> None:
    path = write(tmp_path, numbered(20, changes=changes))
    message = message_of(TableData(path, "y", split_seed=split_seed))
    assert message.startswith(path)
    assert words in message


def test_cells_of_a_test_file_are_named_by_that_file(tmp_path: Path) -> None:
    test = write(tmp_path, numbered(4, changes={2: "oops,k1,3"}), "test.csv")
    message = message_of(TableData(write(tmp_path, numbered(10)), "y", test_path=test))
    assert message.startswith(test)
    assert "column `x` has 1 value(s) that are not numbers (row 2: 'oops')" in message


def test_lists_in_cells(tmp_path: Path) -> None:
    path = write(tmp_path, '{"x": [1, 2], "y": 2}\n{"x": [1], "y": 3}\n', "t.jsonl")
    message = message_of(TableData(path, "y"))
    assert "column `x` holds lists or objects, not numbers or text. Leave it out: data.features." in message


def test_inputs_need_the_columns_of_the_training_data(tmp_path: Path) -> None:
    data = TableData(write(tmp_path, numbered(10)), "y")
    data.setup()
    new = write(tmp_path, "kind,y\nk0,1\n", "new.csv")
    with pytest.raises(DataError, match=r"there is no column `x` \(columns of the training data\). Columns: kind, y"):
        data.read_inputs(Path(new))


def test_no_inputs_give_no_rows(tmp_path: Path) -> None:
    data = TableData(write(tmp_path, numbered(10)), "y")
    data.setup()
    inputs = data.read_inputs(Path(write(tmp_path, "x,kind\n", "new.csv")))
    assert inputs.ids == []
    assert inputs.tensors["features"].shape == (0, 3)


def test_shares_are_checked_with_the_config() -> None:
    (problem,) = TableData.config_problems({"val_frac": 0.5, "test_frac": 0.5})
    assert "`{key}.val_frac` and `{key}.test_frac` together must be below 1" in problem


def test_no_warning_for_known_categories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TableData(write(tmp_path, numbered(30)), "y").setup()
    assert caplog.text == ""
