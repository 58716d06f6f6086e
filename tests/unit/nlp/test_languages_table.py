"""The vendored language table: its counts, its bytes, and that nothing leaks from one split to another."""

import gzip
import hashlib
from collections import Counter, defaultdict
from pathlib import Path

import polars
import pytest

import leyden.nlp

FOLDER = Path(next(iter(leyden.nlp.__path__)))
TABLE = FOLDER / "languages.tsv.gz"
# Printed by scripts/make_languages.py with Babel 2.19.0.
SHA256 = "f1e3eb7f2bd170eaadde4e1130ad92e48151f0dff6d1292e0af0c48aa8c63b71"
SPLITS = {"train": 19226, "val": 2226, "test": 2488}
LANGUAGES = {
    "en": 979,
    "de": 1124,
    "nl": 1132,
    "sv": 1015,
    "da": 839,
    "fi": 1209,
    "fr": 1354,
    "es": 1039,
    "pt": 1074,
    "it": 1035,
    "ro": 1046,
    "pl": 1323,
    "cs": 1536,
    "hu": 1333,
    "tr": 1427,
    "vi": 1459,
    "id": 896,
    "ru": 1242,
    "uk": 1558,
    "bg": 1320,
}
NUM_CONCEPTS = 1955


@pytest.fixture(scope="module")
def content() -> bytes:
    return gzip.decompress(TABLE.read_bytes())


@pytest.fixture(scope="module")
def rows(content: bytes) -> list[dict[str, str]]:
    return polars.read_csv(content, separator="\t").to_dicts()


def test_bytes_are_those_the_script_wrote(content: bytes) -> None:
    assert hashlib.sha256(content).hexdigest() == SHA256


def test_counts_are_those_the_script_printed(rows: list[dict[str, str]]) -> None:
    assert list(rows[0]) == ["text", "language", "concept", "split"]
    assert Counter(row["split"] for row in rows) == SPLITS
    assert len({row["concept"] for row in rows}) == NUM_CONCEPTS
    assert Counter(row["language"] for row in rows) == LANGUAGES
    assert len(LANGUAGES) == 20


def test_a_csv_reader_and_a_split_at_tabs_see_the_same(content: bytes, rows: list[dict[str, str]]) -> None:
    lines = content.decode("utf-8").splitlines()
    assert [line.split("\t") for line in lines[1:]] == [list(row.values()) for row in rows]


def test_every_language_is_in_every_split(rows: list[dict[str, str]]) -> None:
    for split in SPLITS:
        assert {row["language"] for row in rows if row["split"] == split} == set(LANGUAGES)


def test_texts_are_four_characters_or_longer(rows: list[dict[str, str]]) -> None:
    assert min(len(row["text"]) for row in rows) == 4


@pytest.mark.parametrize("column", ["language", "split"])
def test_no_text_has_two_labels_or_splits_whatever_its_case(rows: list[dict[str, str]], column: str) -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        values[row["text"].casefold()].add(row[column])
    assert [text for text, found in values.items() if len(found) > 1] == []


def test_no_concept_is_in_two_splits(rows: list[dict[str, str]]) -> None:
    splits: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        splits[row["concept"]].add(row["split"])
    assert [concept for concept, found in splits.items() if len(found) > 1] == []


def test_split_follows_the_hash_of_the_concept(rows: list[dict[str, str]]) -> None:
    for row in rows:
        bucket = int(hashlib.sha256(row["concept"].encode()).hexdigest(), 16) % 100
        assert row["split"] == ("train" if bucket < 80 else "val" if bucket < 90 else "test"), row


def test_variants_and_daylight_names_share_a_concept(rows: list[dict[str, str]]) -> None:
    concepts = {row["text"]: row["concept"] for row in rows}
    assert concepts["British English"] == "languages/en"
    assert concepts["Central European Standard Time"] == concepts["Central European Summer Time"]


def test_licence_notice_is_beside_the_table() -> None:
    notice = (FOLDER / "LICENSE.unicode").read_text(encoding="utf-8")
    assert notice.startswith("UNICODE LICENSE V3")
    assert "Copyright © 2004-2025 Unicode, Inc." in notice
