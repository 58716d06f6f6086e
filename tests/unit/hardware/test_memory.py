"""Budgets: sizes as people write them, cards by name, and what is left for tensors."""

from __future__ import annotations

import pytest

from leyden.errors import ConfigError, HardwareError
from leyden.hardware.memory import CARD_MEMORY_MIB, Budget, format_gib, parse_budget
from leyden.hardware.peaks import PEAK_TFLOPS


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("80GB", 80_000_000_000),
        ("512MiB", 2**29),
        ("512 MB", 512_000_000),
        ("1TiB", 2**40),
        ("1000B", 1000),
        ("NVIDIA H200", 143_771 * 2**20),
    ],
)
def test_sizes_and_cards(text: str, total: int) -> None:
    assert parse_budget(text).total == total


@pytest.mark.parametrize("text", ["", "24", "24 parsecs", "0GiB", "-3GiB", "12 34", "1.2.3GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises((ConfigError, HardwareError)) as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)
    assert "--budget 24GiB" in str(caught.value)


def test_unknown_card_is_refused_with_those_known() -> None:
    with pytest.raises(HardwareError) as caught:
        parse_budget("NVIDIA H20")
    message = str(caught.value)
    assert message.startswith(
        "--budget names the card 'NVIDIA H20', whose memory is not known. Did you mean 'NVIDIA H200'?"
    )
    assert all(name in message for name in CARD_MEMORY_MIB)


def test_every_card_with_a_peak_has_a_memory() -> None:
    assert set(CARD_MEMORY_MIB) == set(PEAK_TFLOPS)


def test_allowance_is_taken_off_and_said() -> None:
    # 24 GiB less a twentieth is 22.8 GiB, less 1 GiB is 21.8
    budget = Budget(24 * 2**30, "24GiB")
    assert budget.usable == int(22.8 * 2**30) - 2**30
    assert budget.describe() == (
        "21.80 GiB of 24GiB (24.00 GiB) are for tensors: 1.00 GiB for CUDA's context and libraries and 5% for gaps "
        "between blocks are left free"
    )
    assert Budget(100, "x", context=0).usable == 95
    assert Budget(2**20, "x").usable == 0


def test_small_sizes_are_in_mebibytes() -> None:
    assert format_gib(2**20) == "1.0 MiB"
    assert format_gib(2**30) == "1.00 GiB"
