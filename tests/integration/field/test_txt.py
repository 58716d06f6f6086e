"""Texts: empty ones, other encodings, and the company a text keeps in its batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from field_data import SMALL, TEXTS, text_rows, write_csv

from leyden.runs.evaluate import evaluate_run
from leyden.runs.predict import predict_file
from leyden.runs.restore import load_checkpoint, restore

MODELS = {
    "nlp_ngram": ("model.net.num_buckets=512", "model.net.embed_dim=8"),
    "nlp_cnn": ("model.net.channels=8", "model.net.embed_dim=8"),
    "nlp_transformer": ("model.net.embed_dim=8", "model.net.num_heads=2", "model.net.depth=1"),
}


def arguments_for(model: str) -> list[str]:
    """A short run of one of the networks for texts on texts.csv, by a recipe that sets nothing of any network."""
    data = [argument for argument in TEXTS if argument.startswith("data")]
    return [*SMALL, "experiment=regression", *data, f"model={model}", *MODELS[model]]


# ---- TXT-01: rows without a character --------------------------------------------------------------------------

EMPTY = ["", "   ", "\t \n"]
UNKNOWN = "漢字仮名"


@pytest.mark.parametrize("model", MODELS)
def test_txt_01_empty_texts_train_and_predict(train: Callable, workspace: Path, model: str) -> None:
    rows = text_rows(40)
    for row, text in ((0, ""), (5, "   "), (9, UNKNOWN), (14, ""), (21, " \t")):
        rows[row][0] = text
    write_csv("texts.csv", ("text", "label"), rows)
    write_csv("test.csv", ("text", "label"), [["", "up"], ["  ", "down"], [UNKNOWN, "up"]])
    result = train(*arguments_for(model), "data.test_path=test.csv")
    assert result.exit_code == 0, result.output
    assert all(math.isfinite(value) for value in result.metrics.values())
    for size in (1, 3):
        again = evaluate_run(result.folder, "test", size)
        assert again["test/loss"] == pytest.approx(result.metrics["test/loss"], abs=1e-5)

    write_csv("new.csv", ("text",), [[text] for text in (*EMPTY, UNKNOWN, "abcde vwxyz " * 3)])
    together = predict_file(result.folder, Path("new.csv"))
    assert len(together) == 5
    for size in (1, 3):
        assert predict_file(result.folder, Path("new.csv"), size)["probability"].to_list() == pytest.approx(
            together["probability"].to_list(), abs=1e-5
        )
    write_csv("empty.csv", ("text",), [[text] for text in EMPTY])
    for size in (1, 3):  # batches of empty rows only
        alone = predict_file(result.folder, Path("empty.csv"), size)
        assert alone["probability"].to_list() == pytest.approx(together["probability"].to_list()[:3], abs=1e-5)
        assert all(math.isfinite(value) for value in alone["probability"])


@pytest.mark.parametrize("model", MODELS)
def test_txt_01_logits_of_empty_batches_are_finite_in_train_and_eval(
    train: Callable, workspace: Path, model: str
) -> None:
    write_csv("texts.csv", ("text", "label"), text_rows(40))
    result = train(*arguments_for(model))
    assert result.exit_code == 0, result.output
    task, data = restore(load_checkpoint(result.folder))
    for mode in (False, True):
        task.train(mode)
        for num_rows in (1, 3):
            tokens = data.vocabulary.encode([""] * num_rows, 64)
            batch = data.transform_batch(data.trim_batch({"tokens": tokens}), None)
            logits = task(batch)
            assert logits.shape == (num_rows, 2)
            assert torch.isfinite(logits).all()


# ---- TXT-04: encodings -----------------------------------------------------------------------------------------


def write_latin(path: str = "texts.csv") -> list[list[str]]:
    """Texts in Latin-1 whose first byte beyond ASCII is in line 11 (the header is line 1)."""
    rows = text_rows(40)
    rows[9][0] = "déjà vu"
    content = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    Path(path).write_bytes(content.encode("latin-1"))
    return rows


def test_txt_04_bytes_that_are_not_utf8_are_named_by_file_and_line(train: Callable, workspace: Path) -> None:
    write_latin()
    result = train(*SMALL, *TEXTS)
    assert result.exit_code == 1
    assert "DataError: texts.csv: line 11 is not utf-8 text (byte 0xe9)" in result.output
    assert "data.encoding=latin-1" in result.output
    assert "Traceback" not in result.output


def test_txt_04_the_encoding_can_be_named_and_holds_for_prediction(train: Callable, workspace: Path) -> None:
    write_latin()
    result = train(*SMALL, *TEXTS, "data.encoding=latin-1", "data.min_count=1")
    assert result.exit_code == 0, result.output
    characters = load_checkpoint(result.folder).data_state["fitted"]["characters"]
    assert "�" not in characters
    Path("new.csv").write_bytes("text\ndéjà vu\n".encode("latin-1"))
    assert len(predict_file(result.folder, Path("new.csv"))) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_txt_04_other_encodings_read_the_same_texts(train: Callable, workspace: Path, encoding: str) -> None:
    from leyden.data.tables import read_table

    Path("texts.csv").write_text("text,label\ndéjà vu,up\n€ 5,down\n", encoding=encoding)
    assert read_table(Path("texts.csv"), encoding)["text"].to_list() == ["déjà vu", "€ 5"]
    if encoding == "utf-8-sig":  # what spreadsheets write as UTF-8
        assert read_table(Path("texts.csv")).columns == ["text", "label"]


def test_txt_04_unknown_encoding_is_refused(train: Callable, workspace: Path) -> None:
    write_latin()
    result = train(*SMALL, *TEXTS, "data.encoding=latin-nonsense")
    assert result.exit_code == 1
    assert "`data.encoding` is 'latin-nonsense', which Python does not know" in result.output


def test_txt_04_other_tables_are_checked_too(train: Callable, workspace: Path) -> None:
    write_csv("texts.csv", ("text", "label"), text_rows(40))
    write_latin("test.csv")
    result = train(*SMALL, *TEXTS, "data.test_path=test.csv")
    assert result.exit_code == 1
    assert "DataError: test.csv: line 11 is not utf-8 text" in result.output
    Path("texts.jsonl").write_bytes(b'{"text": "a", "label": "up"}\n{"text": "d\xe9j\xe0", "label": "down"}\n')
    result = train(*SMALL, *TEXTS, "data.path=texts.jsonl")
    assert result.exit_code == 1
    assert "DataError: texts.jsonl: line 2 is not utf-8 text" in result.output


# ---- TXT-05: padding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_txt_05_prediction_does_not_depend_on_the_longest_text(train: Callable, workspace: Path, model: str) -> None:
    write_csv("texts.csv", ("text", "label"), text_rows(40))
    result = train(*arguments_for(model), "trainer.max_epochs=2")
    assert result.exit_code == 0, result.output
    long = "vwxyz abcde " * 200  # 400 words
    write_csv("alone.csv", ("text",), [["abc vw"]])
    write_csv("batch.csv", ("text",), [["abc vw"], [long], ["e"]])
    alone = predict_file(result.folder, Path("alone.csv"))
    batch = predict_file(result.folder, Path("batch.csv"))
    assert batch["prediction"][0] == alone["prediction"][0]
    assert batch["probability"][0] == pytest.approx(alone["probability"][0], abs=1e-5)
    task, data = restore(load_checkpoint(result.folder))
    short = data.vocabulary.encode(["abc vw"], 256)
    padded = torch.nn.functional.pad(short, (0, 250))  # as in a batch that was not trimmed
    with torch.no_grad():
        logits = [task(data.transform_batch({"tokens": tokens}, None)) for tokens in (short, padded)]
    assert torch.allclose(*logits, atol=1e-5)
