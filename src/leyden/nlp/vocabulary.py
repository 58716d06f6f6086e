"""Characters as numbers: 0 is padding, 1 an unknown character, the others were seen in training."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

PADDING, UNKNOWN, FIRST = 0, 1, 2


@dataclass
class Vocabulary:
    """The characters of the training texts.

    Args:
        lowercase: whether upper and lower case are one.
        characters: by falling frequency; filled by `fit`.
    """

    lowercase: bool = False
    characters: list[str] = field(default_factory=list)

    def fit(self, texts: Iterable[str], min_count: int) -> None:
        """Takes the characters that occur at least `min_count` times."""
        counts = Counter(character for text in texts for character in self.normalise(text))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        self.characters = [character for character, count in ranked if count >= min_count]

    def __len__(self) -> int:
        return FIRST + len(self.characters)

    def normalise(self, text: str) -> str:
        """One spelling for equal texts: composed characters, single blanks, no blanks at the ends."""
        text = " ".join(unicodedata.normalize("NFC", text).split())
        return text.lower() if self.lowercase else text

    def encode(self, texts: Sequence[str], max_length: int) -> Tensor:
        """Encodes texts; what is longer than `max_length` characters is cut off.

        Shape:
            output (num_texts, L) int32, with L the longest length, at least 1 and at most `max_length`.
        """
        index = {character: position for position, character in enumerate(self.characters, FIRST)}
        rows = [[index.get(c, UNKNOWN) for c in self.normalise(text)[:max_length]] for text in texts]
        tokens = np.zeros((len(rows), max([1, *map(len, rows)])), dtype=np.int32)
        for position, row in enumerate(rows):
            tokens[position, : len(row)] = row
        return torch.from_numpy(tokens)

    def state(self) -> dict[str, Any]:
        """The fitted values as plain data."""
        return {"lowercase": self.lowercase, "characters": self.characters}
