"""Text data: the language of short names, and any table with a text and a label."""

from __future__ import annotations

import gzip
import io
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

import polars as pl
import torch
from annotated_types import Ge, Lt

from leyden.data.datamodule import DataModule, Inputs, Loading, stack_column
from leyden.data.loaders import Batch
from leyden.data.splits import split_problems, split_rows
from leyden.data.tables import list_rows, read_table, require_columns
from leyden.errors import DataError
from leyden.nlp.vocabulary import PADDING, Vocabulary

log = logging.getLogger(__name__)

Texts = tuple[list[str], list[str]]


class TextData(DataModule):
    """Texts in memory as character numbers.

    Batches: `tokens` (B, L) int64, 0 is padding, L the longest of the batch; `label` (B,) int64. A subclass gives
    `load_texts`. The vocabulary is fitted on the training texts.

    Args:
        batch_size: global batch size.
        seed: of the order of samples.
        max_length: characters of a text that count; the rest is cut off.
        min_count: a character seen less often in training is unknown.
        lowercase: whether upper and lower case are one.
        reference: a known result for this data.
        loading: where the data stays and how it is read.
    """

    text_column = "text"

    def __init__(
        self,
        batch_size: Annotated[int, Ge(1)] = 128,
        seed: Annotated[int, Ge(0)] = 0,
        max_length: Annotated[int, Ge(1)] = 64,
        min_count: Annotated[int, Ge(1)] = 1,
        lowercase: bool = False,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, reference, **loading)
        self.max_length = max_length
        self.min_count = min_count
        self.vocabulary = Vocabulary(lowercase)
        self.encoding = "utf-8"

    def load_texts(self) -> tuple[dict[str, Texts], list[str]]:
        """Texts and label names per split, and the names of the classes in index order."""
        raise NotImplementedError

    def load_splits(self) -> dict[str, Batch]:
        splits, class_names = self.load_texts()
        self.vocabulary.fit(splits["train"][0], self.min_count)
        index = {name: position for position, name in enumerate(class_names)}
        self.facts = {
            "num_classes": len(class_names),
            "class_names": class_names,
            "vocab_size": len(self.vocabulary),
            "max_length": self.max_length,
        }
        cut = sum(len(text) > self.max_length for text in splits["train"][0])
        if cut:
            log.info("%d training texts are longer than data.max_length=%d and are cut.", cut, self.max_length)
        return {
            name: {
                "tokens": self.vocabulary.encode(texts, self.max_length),
                "label": stack_column([index[label] for label in labels], torch.int64),
            }
            for name, (texts, labels) in splits.items()
        }

    def trim_batch(self, batch: Batch) -> Batch:
        """Cuts the columns that are padding in every row, before the batch goes to the device."""
        used = (batch["tokens"] != PADDING).any(dim=0)
        length = int(used.nonzero().max()) + 1 if used.any() else 1
        return {**batch, "tokens": batch["tokens"][:, :length]}

    def transform_batch(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        return {**batch, "tokens": batch["tokens"].long()}

    def read_inputs(self, path: Path) -> Inputs:
        frame = read_table(path, self.encoding)
        require_columns(frame, [self.text_column], path, "the column of texts")
        texts = ["" if text is None else str(text) for text in frame[self.text_column].to_list()]
        tokens = self.vocabulary.encode(texts, self.max_length)
        return Inputs([str(row + 1) for row in range(len(texts))], {"tokens": tokens})

    def fitted_state(self) -> dict[str, Any]:
        return self.vocabulary.state()

    def load_fitted_state(self, state: dict[str, Any]) -> None:
        self.vocabulary = Vocabulary(**state)


class LanguageNames(TextData):
    """Which of 20 languages a short name (of a language, country, currency, city, month, ...) is written in.

    The splits are by concept, an entry of CLDR: its names in all languages are in one split. Names that several of
    the languages share are left out, since they carry no label.

    Source: Unicode CLDR through babel; see scripts/make_languages.py. Licence: Unicode-3.0.
    """

    def load_texts(self) -> tuple[dict[str, Texts], list[str]]:
        content = gzip.decompress(Path(__file__).with_name("languages.tsv.gz").read_bytes())
        frame = pl.read_csv(io.BytesIO(content), separator="\t", quote_char=None, infer_schema=False)
        splits = {}
        for name in ("train", "val", "test"):
            rows = frame.filter(pl.col("split") == name)
            splits[name] = (rows["text"].to_list(), rows["language"].to_list())
        return splits, sorted(frame["language"].unique().to_list())


class TextTable(TextData):
    """A table with a column of texts and a column of labels.

    Classes are the labels of the training rows in alphabetical order (or `classes`, in the order given), for all
    splits, and stay in the checkpoint.

    Args:
        path: CSV, TSV, JSON lines or Parquet.
        text: column of texts; an empty text is a text.
        label: column of labels, text or numbers.
        classes: the labels there may be; null takes those of the training rows.
        val_path: a table of its own for validation; null takes `val_frac` of the rows.
        test_path: a table of its own for the test; null takes `test_frac` of the rows.
        val_frac: share of the rows for validation; 0 asks for none.
        test_frac: share of the rows for the test.
        split_seed: of the assignment of rows to splits; equal texts are never in two splits.
        encoding: of text files.
        batch_size: global batch size.
        seed: of the order of samples.
        max_length: characters of a text that count; the rest is cut off.
        min_count: a character seen less often in training is unknown.
        lowercase: whether upper and lower case are one.
        reference: a known result for this data.
        loading: where the data stays and how it is read.
    """

    def __init__(
        self,
        path: str,
        text: str,
        label: str,
        classes: Sequence[str | int] | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        val_frac: Annotated[float, Ge(0), Lt(1)] = 0.15,
        test_frac: Annotated[float, Ge(0), Lt(1)] = 0.2,
        split_seed: Annotated[int, Ge(0)] = 0,
        encoding: str = "utf-8",
        batch_size: Annotated[int, Ge(1)] = 128,
        seed: Annotated[int, Ge(0)] = 0,
        max_length: Annotated[int, Ge(1)] = 256,
        min_count: Annotated[int, Ge(1)] = 2,
        lowercase: bool = False,
        reference: Mapping[str, Any] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__(batch_size, seed, max_length, min_count, lowercase, reference, **loading)
        self.path = path
        self.text_column, self.label_column = text, label
        self.classes = [str(name) for name in classes] if classes is not None else None
        self.val_path, self.test_path = val_path, test_path
        self.val_frac, self.test_frac, self.split_seed = val_frac, test_frac, split_seed
        self.encoding = encoding
        self.allows_empty_val = val_frac == 0 and val_path is None

    @classmethod
    def config_problems(cls, values: dict[str, Any]) -> list[str]:
        """Rules between keys that their types cannot say; `{key}` stands for the section."""
        return split_problems(values)

    def load_texts(self) -> tuple[dict[str, Texts], list[str]]:
        texts, labels = self._read(self.path)
        if not texts:
            raise DataError(f"{self.path} has a header but no rows.")
        val_frac = 0.0 if self.val_path else self.val_frac
        test_frac = 0.0 if self.test_path else self.test_frac
        keys = [self.vocabulary.normalise(text) for text in texts]
        rows = split_rows(keys, val_frac, test_frac, self.split_seed)
        splits = {name: ([texts[i] for i in found], [labels[i] for i in found]) for name, found in rows.items()}
        for name, path in (("val", self.val_path), ("test", self.test_path)):
            if path:
                splits[name] = self._read(path)
        names = self.classes if self.classes is not None else sorted(set(splits["train"][1]))
        for name, (_, found_labels) in splits.items():
            self._check_labels(name, found_labels, names)
        if len(names) < 2:
            raise DataError(
                f"{self.path}: column `{self.label_column}` has one label only ({names}); 2 or more are needed."
            )
        return splits, names

    def _read(self, path: str) -> Texts:
        frame = read_table(Path(path), self.encoding)
        require_columns(frame, [self.text_column], path, "data.text")
        require_columns(frame, [self.label_column], path, "data.label")
        labels = [None if value is None else str(value).strip() for value in frame[self.label_column].to_list()]
        missing = [row for row, label in enumerate(labels) if not label]
        if missing:
            raise DataError(
                f"{path}: column `{self.label_column}` is empty in {len(missing)} row(s) ({list_rows(missing)})."
            )
        if self.classes is not None:
            wrong = [row for row, label in enumerate(labels) if label not in self.classes]
            if wrong:
                raise DataError(
                    f"{path}: label '{labels[wrong[0]]}' in {list_rows(wrong)} ({len(wrong)} in all) is not one of "
                    f"data.classes: {', '.join(self.classes)}."
                )
        texts = ["" if text is None else str(text) for text in frame[self.text_column].to_list()]
        return texts, [str(label) for label in labels]

    def _check_labels(self, split: str, labels: list[str], names: list[str]) -> None:
        unknown = Counter(label for label in labels if label not in set(names))
        if unknown:
            listed = ", ".join(f"'{label}' ({count} rows)" for label, count in unknown.items())
            source = {"val": self.val_path, "test": self.test_path}.get(split) or self.path
            raise DataError(
                f"{source}: the {split} rows have labels that no training row has: {listed}. "
                f"Training labels: {', '.join(names)}. Add training rows for them, or remove these rows."
            )
