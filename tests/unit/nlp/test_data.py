"""Text data: the languages that come with Leyden, and any table of texts and labels."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from data_contract import DataModuleContract

from leyden.data.datamodule import DataModule
from leyden.errors import DataError
from leyden.nlp.data import LanguageNames, TextTable


def write_texts(texts: list[str], folder: Path, name: str) -> Path:
    path = folder / "inputs.jsonl"
    path.write_text("".join(json.dumps({name: text}) + "\n" for text in texts), encoding="utf-8")
    return path


class TestLanguageNames(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        return LanguageNames(batch_size=2000, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        assert isinstance(data, LanguageNames)
        return write_texts(data.load_texts()[0]["test"][0], folder, "text")

    def test_counts(self, data: DataModule) -> None:
        # Printed by scripts/make_languages.py
        assert [data.num_samples(split) for split in ("train", "val", "test")] == [19226, 2226, 2488]
        assert data.facts["num_classes"] == 20
        assert data.facts["class_names"] == sorted(data.facts["class_names"])
        assert data.facts["max_length"] == 64


TEXTS = [f"{animal} {number}" for number in range(10) for animal in ("cat", "dög", "fox")]


def write_table(folder: Path, name: str = "texts.csv", **columns: Any) -> str:
    path = folder / name
    frame = pl.DataFrame(columns)
    frame.write_csv(path) if path.suffix == ".csv" else frame.write_ndjson(path)
    return str(path)


class TestTextTable(DataModuleContract):
    def build(self, folder: Path, seed: int) -> DataModule:
        path = write_table(folder, body=TEXTS, kind=[text.split()[0] for text in TEXTS])
        return TextTable(path, "body", "kind", min_count=1, batch_size=4, seed=seed)

    def write_inputs(self, data: DataModule, folder: Path) -> Path:
        assert isinstance(data, TextTable)
        return write_texts(data.load_texts()[0]["test"][0], folder, "body")


def build(path: str, **changes: Any) -> TextTable:
    return TextTable(path, **({"text": "body", "label": "kind", "min_count": 1} | changes))


def message_of(data: DataModule) -> str:
    with pytest.raises(DataError) as caught:
        data.setup()
    return str(caught.value)


def test_tokens_are_trimmed_to_the_longest_row_of_the_batch() -> None:
    data = LanguageNames()
    batch = {"tokens": torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]], dtype=torch.int32), "label": torch.tensor([0, 1])}
    assert data.trim_batch(batch)["tokens"].tolist() == [[5, 6], [7, 0]]
    batch["tokens"] = torch.zeros(2, 4, dtype=torch.int32)
    assert data.trim_batch(batch)["tokens"].tolist() == [[0], [0]]  # empty texts keep one column


def test_vocabulary_is_that_of_the_training_texts(tmp_path: Path) -> None:
    train = write_table(tmp_path, "train.csv", body=["ab", "ba"], kind=["x", "y"])
    test = write_table(tmp_path, "test.csv", body=["az"], kind=["x"])
    data = build(train, val_frac=0.0, test_path=test)
    data.setup()
    assert data.facts["vocab_size"] == 4  # padding, unknown, a, b
    assert data.splits["test"]["tokens"].tolist() == [[2, 1]]


def test_labels_may_be_numbers_and_keep_their_order(tmp_path: Path) -> None:
    path = write_table(tmp_path, "t.jsonl", body=list("abcdef"), kind=[10, 9, 10, 9, 10, 9])
    data = build(path, classes=[9, 10], val_frac=0.0, test_frac=0.5)
    data.setup()
    assert data.facts["class_names"] == ["9", "10"]
    assert sorted(torch.cat([data.splits[s]["label"] for s in ("train", "test")]).tolist()) == [0, 0, 0, 1, 1, 1]


def test_equal_texts_stay_together_whatever_their_case_and_blanks(tmp_path: Path) -> None:
    path = write_table(tmp_path, body=["Same", "same ", " SAME", "a", "b", "c", "d", "e"], kind=list("xxxxyyyy"))
    for split_seed in range(4):
        splits, _ = build(path, lowercase=True, split_seed=split_seed, test_frac=0.4, classes=["x", "y"]).load_texts()
        homes = [name for name, (texts, _) in splits.items() if any(text.strip().lower() == "same" for text in texts)]
        assert len(homes) == 1


def test_cut_texts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_table(tmp_path, body=["a" * 9, "b" * 8, "c" * 3], kind=["x", "y", "x"])
    data = build(path, max_length=7, val_frac=0.0, test_path=path)
    with caplog.at_level(logging.INFO):
        data.setup()
    assert "2 training texts are longer than data.max_length=7 and are cut." in caplog.text
    assert data.splits["train"]["tokens"].shape == (3, 7)


def test_empty_text_is_a_text(tmp_path: Path) -> None:
    path = write_table(tmp_path, body=["", "a", None, "b"], kind=list("xyxy"))
    data = build(path, val_frac=0.0, test_path=path)
    data.setup()
    assert data.splits["test"]["tokens"].tolist() == [[0], [2], [0], [3]]


@pytest.mark.parametrize(
    ("columns", "changes", "words"),
    [
        (
            {"text": ["a"], "kind": ["x"]},
            {},
            ["there is no column `body` (data.text). Columns: text, kind."],
        ),
        ({"body": ["a"], "label": ["x"]}, {}, ["there is no column `kind` (data.label). Columns: body, label."]),
        ({"body": [], "kind": []}, {}, ["has a header but no rows"]),
        (
            {"body": ["a", "b", "c"], "kind": ["x", None, " "]},
            {},
            ["column `kind` is empty in 2 row(s) (rows 2, 3)."],
        ),
        (
            {"body": ["a", "b", "c"], "kind": ["x", "z", "z"]},
            {"classes": ["x", "y"]},
            ["label 'z' in rows 2, 3 (2 in all) is not one of data.classes: x, y."],
        ),
        (
            {"body": ["a", "b", "c"], "kind": ["x", "x", "x"]},
            {"val_frac": 0.0, "test_frac": 0.0},
            ["column `kind` has one label only (['x']); 2 or more are needed."],
        ),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, columns: dict, changes: dict, words: list[str]) -> None:
    path = tmp_path / "t.csv"
    pl.DataFrame(columns).write_csv(path)
    message = message_of(build(str(path), **changes))
    assert message.startswith(str(path))
    for word in words:
        assert word in message


def test_label_that_training_does_not_have(tmp_path: Path) -> None:
    train = write_table(tmp_path, "train.csv", body=["a", "b"], kind=["x", "y"])
    test = write_table(tmp_path, "test.csv", body=["c", "d", "e"], kind=["z", "x", "z"])
    message = message_of(build(train, val_frac=0.0, test_path=test))
    assert f"{test}: the test rows have labels that no training row has: 'z' (2 rows)." in message
    assert "Training labels: x, y. Add training rows for them, or remove these rows." in message


def test_inputs_need_the_column_of_texts(tmp_path: Path) -> None:
    path = write_table(tmp_path, "new.csv", title=["a"])
    with pytest.raises(DataError, match=r"there is no column `text` \(the column of texts\). Columns: title"):
        LanguageNames().read_inputs(Path(path))


def test_shares_are_checked_with_the_config() -> None:
    (problem,) = TextTable.config_problems({"val_frac": 0.5, "test_frac": 0.5})
    assert "`{key}.val_frac` and `{key}.test_frac` together must be below 1" in problem
