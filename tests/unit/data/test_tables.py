"""Tables: reading files as they come, and encoding columns by what the training rows have."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from leyden.data.tables import TableEncoder, list_rows, parse_numbers, read_numbers, read_table, require_columns
from leyden.errors import DataError


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path: Path, encoding: str = "utf-8") -> dict[str, list[Any]]:
    return read_table(path, encoding).to_dict(as_series=False)


# ---- reading ------------------------------------------------------------------------------------------------


def test_csv_cells_stay_text_and_empty_cells_are_missing(tmp_path: Path) -> None:
    path = write(tmp_path, "id,note,x\n007,true,1e3\n,,\n")
    assert rows_of(path) == {"id": ["007", None], "note": ["true", None], "x": ["1e3", None]}


@pytest.mark.parametrize(
    ("content", "name", "encoding"),
    [
        ("a,b\n1,é\n".encode(), "t.csv", "utf-8"),
        ("\ufeffa,b\n1,é\n".encode(), "t.csv", "utf-8"),  # Excel's byte order mark
        ("a,b\n1,é\n".encode("latin-1"), "t.csv", "latin-1"),
        ("a,b\n1,é\n".encode("utf-16"), "t.csv", "utf-16"),
        ("a\tb\n1\té\n".encode(), "t.tsv", "utf-8"),
        (b"a,b\r\n1,\xc3\xa9\r\n", "t.txt", "utf-8"),
        (" a , b\n1,é\n".encode(), "t.csv", "utf-8"),  # blanks round column names
        ('a,b\n1,"é"\n'.encode(), "t.csv", "utf-8"),
    ],
)
def test_text_files(tmp_path: Path, content: bytes, name: str, encoding: str) -> None:
    assert rows_of(write(tmp_path, content, name), encoding) == {"a": ["1"], "b": ["é"]}


def test_quoted_cells_keep_commas_and_line_ends(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, 'a,b\n"1,5","x\ny"\n')) == {"a": ["1,5"], "b": ["x\ny"]}


@pytest.mark.parametrize("name", ["t.jsonl", "t.ndjson"])
def test_json_lines_have_types_and_may_lack_keys(tmp_path: Path, name: str) -> None:
    lines = "".join(['{"a": 1}\n'] * 150 + ['{"a": 2.5, "b": "x"}\n'])
    found = rows_of(write(tmp_path, lines, name))
    assert found["a"][-1] == 2.5
    assert found["b"][0] is None
    assert found["b"][-1] == "x"


def test_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame({"a": [1, None], "b": ["x", "y"]})
    frame.write_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").equals(frame)


@pytest.mark.parametrize(
    ("content", "name", "encoding", "words"),
    [
        (b"", "t.csv", "utf-8", ["t.csv is empty: it has not even a header line."]),
        (b"a,b\n1,2,3\n", "t.csv", "utf-8", ["t.csv cannot be read as a table:"]),
        (b"a, a\n1,2\n", "t.csv", "utf-8", ["t.csv cannot be read as a table:", "duplicate"]),
        (b"not json\n", "t.jsonl", "utf-8", ["t.jsonl cannot be read as a table:"]),
        (b"no parquet", "t.parquet", "utf-8", ["t.parquet cannot be read as a table:"]),
        (b"a", "t.xlsx", "utf-8", ["unknown kind of table '.xlsx'. Use .csv, .tsv, .jsonl or .parquet."]),
        (
            b"a\n1\ncaf\xe9\n",
            "t.csv",
            "utf-8",
            ["line 3 is not utf-8 text (byte 0xe9).", "Save the file as UTF-8", "data.encoding=latin-1"],
        ),
        (b"a\n1\n", "t.csv", "klingon", ["`data.encoding` is 'klingon', which Python does not know.", "latin-1"]),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, name: str, encoding: str, words: list[str]) -> None:
    path = write(tmp_path, content, name)
    with pytest.raises(DataError) as caught:
        read_table(path, encoding)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_named_with_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        read_table(Path("nope.csv"))
    assert f"There is no file {tmp_path / 'nope.csv'}. Check the path" in str(caught.value)


def test_missing_columns_are_all_named() -> None:
    frame = pl.DataFrame({"a": [1], "b": [2]})
    require_columns(frame, ["a", "b"], "t.csv", "data.features")
    with pytest.raises(DataError) as caught:
        require_columns(frame, ["a", "c", "d"], "t.csv", "data.features")
    assert str(caught.value) == "t.csv: there is no column `c`, `d` (data.features). Columns: a, b."


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([0], "row 1"),
        ([2, 8], "rows 3, 9"),
        (list(range(5)), "rows 1, 2, 3, 4, 5"),
        (list(range(6)), "rows 1, 2, 3, 4, 5, ..."),
    ],
)
def test_rows_are_counted_from_one(rows: list[int], text: str) -> None:
    assert list_rows(rows) == text


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "numbers", "wrong"),
    [
        (["1", " 2.5 ", "-3e2", None, "", "  "], [1.0, 2.5, -300.0, None, None, None], []),
        (["nan", "NaN", "inf", "-inf"], [None, None, math.inf, -math.inf], []),
        (["1", "4-5", "n/a", "1,5"], [1.0, None, None, None], [1, 2, 3]),
        ([1, None, 3], [1.0, None, 3.0], []),
        ([1.5, float("nan")], [1.5, None], []),
        ([True, False], [1.0, 0.0], []),
        ([], [], []),
    ],
)
def test_cells_as_numbers(cells: list[Any], numbers: list[float | None], wrong: list[int]) -> None:
    assert parse_numbers(pl.Series("x", cells)) == (numbers, wrong)


def test_text_among_numbers() -> None:
    cells = ["1", "n/a", "4-5", *["?"] * 5]
    with pytest.raises(DataError) as caught:
        read_numbers(pl.Series("rooms", cells), "t.csv", "Clean them.")
    assert str(caught.value) == (
        "t.csv: column `rooms` has 7 value(s) that are not numbers "
        "(rows 2, 3, 4, 5, 6, ...: 'n/a', '4-5', '?', '?', '?'). Clean them."
    )


# ---- encoding -----------------------------------------------------------------------------------------------

TRAIN = pl.DataFrame({"x": ["1", "2", "6"], "kind": ["b", "a", "b"], "code": ["7", "8", "7"]})


def fit(frame: pl.DataFrame, categorical: list[str] | None = None, impute: Any = None) -> TableEncoder:
    encoder = TableEncoder(impute)
    encoder.fit(frame, frame.columns, categorical, "t.csv")
    return encoder


def test_numbers_are_standardised_and_categories_one_hot() -> None:
    encoder = fit(TRAIN, categorical=["code"])
    assert encoder.feature_names == ["x", "kind=a", "kind=b", "code=7", "code=8"]
    # mean (1 + 2 + 6) / 3 = 3, variance (4 + 1 + 9) / 3 = 14/3
    assert encoder.means == [3.0]
    assert encoder.stds == pytest.approx([(14 / 3) ** 0.5])
    found = encoder.transform(TRAIN, "t.csv")
    assert found.dtype == torch.float32
    assert found[:, 0].tolist() == pytest.approx([-2 / (14 / 3) ** 0.5, -1 / (14 / 3) ** 0.5, 3 / (14 / 3) ** 0.5])
    assert found[:, 1:].tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]


def test_other_rows_are_encoded_by_what_was_fitted() -> None:
    new = pl.DataFrame({"code": ["9"], "kind": ["zebra"], "x": ["3"]})  # the order of columns does not matter
    encoder = fit(TRAIN, categorical=["code"])
    assert encoder.transform(new, "new.csv").tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0]]
    assert encoder.unknown_categories(new) == {"kind": {"zebra": 1}, "code": {"9": 1}}
    assert encoder.unknown_categories(TRAIN) == {}


def test_mean_and_deviation_of_large_numbers() -> None:
    # 1e9 + (0, 1, 2): mean 1e9 + 1, deviation sqrt(2/3); sums of squares in float64 would lose it
    frame = pl.DataFrame({"x": [1e9, 1e9 + 1, 1e9 + 2]})
    encoder = fit(frame)
    assert encoder.stds == pytest.approx([(2 / 3) ** 0.5])
    assert encoder.transform(frame, "").flatten().tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449])


@pytest.mark.parametrize("value", [0.0, 5.0, 0.1, 1e12])
def test_constant_column_is_zero(value: float) -> None:
    frame = pl.DataFrame({"x": [value] * 7})
    assert fit(frame).transform(frame, "").abs().max() < 1e-3
    assert fit(frame).stds == [1.0]


def test_categories_may_look_like_numbers_in_types() -> None:
    encoder = fit(pl.DataFrame({"origin": [3, 1, 3]}), categorical=["origin"])
    assert encoder.feature_names == ["origin=1", "origin=3"]
    # A CSV file has text where JSON has numbers.
    assert encoder.transform(pl.DataFrame({"origin": [" 3 "]}), "").tolist() == [[0.0, 1.0]]


def test_missing_values_are_refused_in_all_columns_at_once() -> None:
    frame = pl.DataFrame({"x": ["1", "", "inf", "4"], "kind": ["a", None, "b", "b"]})
    with pytest.raises(DataError) as caught:
        fit(frame)
    assert str(caught.value) == (
        "t.csv: missing or infinite values in `x` (2 of 4: rows 2, 3), `kind` (1 of 4: row 2). "
        "Fill them in, or use data.impute=mean to put the training mean in their place."
    )


def test_missing_values_in_new_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"new.csv: missing or infinite values in `x` \(1 of 1: row 1\)"):
        fit(TRAIN).transform(pl.DataFrame({"x": [""], "kind": ["a"], "code": ["7"]}), "new.csv")


def test_imputed_numbers_are_the_training_mean_and_missing_categories_one_of_their_own() -> None:
    frame = pl.DataFrame({"x": ["1", "", "inf", "5"], "kind": ["a", None, "b", "b"]})
    encoder = fit(frame, impute="mean")
    assert encoder.means == [3.0]  # of 1 and 5
    assert encoder.stds == [2.0]
    assert encoder.feature_names == ["x", "kind=", "kind=a", "kind=b"]
    assert encoder.transform(frame, "").tolist() == [[-1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1]]


def test_numbers_and_text_in_one_column() -> None:
    with pytest.raises(DataError) as caught:
        fit(pl.DataFrame({"x": ["1", "two", "3"]}))
    assert "column `x` has 1 value(s) that are not numbers (row 2: 'two')" in str(caught.value)
    assert "Clean them, or add x to data.categorical." in str(caught.value)


def test_column_without_a_value() -> None:
    with pytest.raises(
        DataError, match=r"t.csv: column `x` has no value in the training rows\. Leave it out: data\.features"
    ):
        fit(pl.DataFrame({"x": [None, None], "y": ["1", "2"]}), impute="mean")


def test_no_columns() -> None:
    encoder = fit(pl.DataFrame({"x": [1, 2]}).select([]))
    with pytest.raises(DataError, match=r"there is no column to learn from\. List some in data\.features"):
        encoder.transform(pl.DataFrame({"x": [1]}), "t.csv")


def test_state_is_enough() -> None:
    encoder = fit(TRAIN, categorical=["code"], impute="mean")
    file = io.BytesIO()
    torch.save(encoder.state(), file)
    file.seek(0)
    again = TableEncoder(**torch.load(file, weights_only=True))
    assert again == encoder
    assert again.transform(TRAIN, "").equal(encoder.transform(TRAIN, ""))
