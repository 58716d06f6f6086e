"""Characters as numbers: by frequency, with padding and unknown, after one spelling for equal texts."""

import pytest
import torch

from leyden.nlp.vocabulary import PADDING, UNKNOWN, Vocabulary


def fitted(texts: list[str], min_count: int = 1, lowercase: bool = False) -> Vocabulary:
    vocabulary = Vocabulary(lowercase)
    vocabulary.fit(texts, min_count)
    return vocabulary


def test_characters_are_numbered_by_falling_frequency_then_by_code() -> None:
    vocabulary = fitted(["banana", "bc"])
    # a 3, b 2, n 2, c 1; 0 is padding, 1 is unknown
    assert vocabulary.characters == ["a", "b", "n", "c"]
    assert len(vocabulary) == 6
    assert vocabulary.encode(["banc"], 10).tolist() == [[3, 2, 4, 5]]


def test_short_rows_are_padded_and_unseen_characters_unknown() -> None:
    assert (PADDING, UNKNOWN) == (0, 1)
    tokens = fitted(["ab"]).encode(["a", "bz!", ""], 10)
    assert tokens.tolist() == [[2, 0, 0], [3, 1, 1], [0, 0, 0]]
    assert tokens.dtype == torch.int32


def test_long_texts_are_cut() -> None:
    assert fitted(["ab"]).encode(["abababab", "b"], 3).tolist() == [[2, 3, 2], [3, 0, 0]]


def test_rare_characters_are_unknown() -> None:
    vocabulary = fitted(["aab", "ac"], min_count=2)
    assert vocabulary.characters == ["a"]
    assert vocabulary.encode(["abc"], 9).tolist() == [[2, 1, 1]]


@pytest.mark.parametrize("texts", [[], [""], ["", " "]])
def test_at_least_one_column(texts: list[str]) -> None:
    assert fitted(["a"]).encode(texts, 5).shape == (len(texts), 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e\u0301", "\u00e9"),  # composed: e and an accent are one character
        ("  a \t\n b  ", "a b"),
        ("a\u00a0b", "a b"),  # a no-break space is a blank
        ("", ""),
        ("Straße", "Straße"),
    ],
)
def test_one_spelling_for_equal_texts(text: str, expected: str) -> None:
    assert Vocabulary().normalise(text) == expected


def test_case_is_one_when_asked_for() -> None:
    assert Vocabulary(lowercase=True).normalise("ÄB c") == "äb c"
    assert Vocabulary().normalise("ÄB c") == "ÄB c"
    assert fitted(["Aa"], lowercase=True).encode(["aA"], 5).tolist() == [[2, 2]]


def test_state_is_enough() -> None:
    vocabulary = fitted(["Größe", "böse"], lowercase=True)
    again = Vocabulary(**vocabulary.state())
    assert again == vocabulary
    assert again.encode(["gößx"], 9).equal(vocabulary.encode(["gößx"], 9))
