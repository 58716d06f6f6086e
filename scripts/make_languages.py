#!/usr/bin/env python3
"""Build the language-identification table of Leyden's NLP domain from the CLDR names that Babel carries.

Each row is the name of a language, territory, currency, script, time zone, city, month or weekday in one of
20 languages; the task is to tell the language from the text. Every name belongs to a concept
(`currencies/EUR`, `months/3`), and a whole concept is in one split, so a test text is never the translation
of a training text.

Needs Babel (`pip install babel==2.19.0`). Other versions carry another CLDR release and give another table.

Source: Unicode CLDR 49 (Unicode License v3, LICENSE.unicode beside the table), as packaged by Babel 2.19.
"""

import argparse
import gzip
import hashlib
import io
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import babel

BABEL_VERSION = "2.19"
LANGUAGES = [
    *("en", "de", "nl", "sv", "da", "fi", "fr", "es", "pt", "it"),
    *("ro", "pl", "cs", "hu", "tr", "vi", "id", "ru", "uk", "bg"),
]
MIN_CHARACTERS = 4
SPLITS = ("train", "val", "test")
DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "src" / "leyden" / "nlp" / "languages.tsv.gz"


class Row(NamedTuple):
    """One line of the table."""

    text: str
    language: str
    concept: str
    split: str


def compute_split(concept: str) -> str:
    """Give the split of a concept: sha256 modulo 100 below 80 is train, below 90 val, the rest test."""
    bucket = int(hashlib.sha256(concept.encode("utf-8")).hexdigest(), 16) % 100
    return SPLITS[(bucket >= 80) + (bucket >= 90)]


def load_names(language: str) -> Iterator[tuple[str, str]]:
    """Read the (concept, text) pairs of one language.

    Variants of a language (`en`, `en_GB`) share a concept, and so do the generic, standard and daylight names
    of a zone. Months and weekdays are taken in their wide form as used within a date.
    """
    # Babel has no public way to the exemplar cities and zone names of a locale, hence its data dictionary.
    data = babel.Locale.parse(language)._data
    for key, text in data["languages"].items():
        yield f"languages/{key.split('_')[0]}", text
    for kind in ("territories", "scripts"):
        for key, text in data[kind].items():
            yield f"{kind}/{key}", text
    for key, text in data["currency_names"].items():
        yield f"currencies/{key}", text
    for key, names in data["meta_zones"].items():
        for text in names.get("long", {}).values():
            yield f"meta_zones/{key}", text
    for key, names in data["time_zones"].items():
        if "city" in names:
            yield f"cities/{key}", names["city"]
    for kind in ("months", "days"):
        for key, text in data[kind]["format"]["wide"].items():
            yield f"{kind}/{key}", text


def build_rows() -> list[Row]:
    """Collect the names of all languages, without those that two languages share (letter case aside).

    A text that names several concepts of one language (a city and its country) is kept once, under the first.

    Returns:
        Rows sorted by text, then language. No text, letter case aside, and no concept is in two splits.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    first: dict[str, tuple[str, str, str]] = {}
    for language in LANGUAGES:
        for concept, raw in load_names(language):
            # Without double quotes, readers that know quoting and readers that split at tabs see the same.
            text = raw.strip().replace('"', "'")
            if len(text) < MIN_CHARACTERS:
                continue
            if any(mark in text for mark in "\t\r\n"):
                raise ValueError(f"{language} {concept}: {text!r} holds a tab or line break. Clean it first.")
            owners[text.casefold()].add(language)
            first.setdefault(text.casefold(), (text, language, concept))
    kept = (first[folded] for folded, languages in owners.items() if len(languages) == 1)
    return sorted(Row(text, language, concept, compute_split(concept)) for text, language, concept in kept)


def write_table(rows: list[Row], path: Path) -> str:
    """Write the rows as gzipped tab-separated values, with the same bytes each time.

    Returns:
        The sha256 of the text before compression (compressed bytes may differ between zlib versions).
    """
    content = "".join("\t".join(line) + "\n" for line in [Row._fields, *rows]).encode("utf-8")
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as stream:
        stream.write(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed.getvalue())
    return hashlib.sha256(content).hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, write the table and print its counts."""
    parser = argparse.ArgumentParser(description="Build the language-identification table from Babel's CLDR names.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="to write (default: %(default)s)")
    output = parser.parse_args(arguments).output
    if not babel.__version__.startswith(BABEL_VERSION):
        print(f"Babel {babel.__version__} gives another table than Babel {BABEL_VERSION}.", file=sys.stderr)

    rows = build_rows()
    digest = write_table(rows, output)
    splits = Counter(row.split for row in rows)
    languages = Counter(row.language for row in rows)
    concepts = {row.concept for row in rows}
    print(f"{output}: {output.stat().st_size} bytes, sha256 of the text {digest}")
    print(f"rows: {len(rows)}  concepts: {len(concepts)}")
    print("splits:", "  ".join(f"{split} {splits[split]}" for split in SPLITS))
    print("languages:", "  ".join(f"{language} {languages[language]}" for language in LANGUAGES))


if __name__ == "__main__":
    main()
