"""How much memory a card has, what of it a step can use, and sizes as people write them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from leyden.errors import ConfigError, HardwareError

MIB, GIB = 2**20, 2**30

# Memory by the exact name that the driver gives a card, in MiB: `memory.total` as nvidia-smi prints it with drivers of
# 2023 and later. It is somewhat less than a data sheet says where part of the memory checks the rest (ECC).
CARD_MEMORY_MIB: dict[str, int] = {
    "NVIDIA H200": 143_771,
    "NVIDIA H100 80GB HBM3": 81_559,
    "NVIDIA A100-SXM4-40GB": 40_960,
    "NVIDIA A100-SXM4-80GB": 81_920,
    "NVIDIA A100-PCIE-40GB": 40_960,
    "NVIDIA A100 80GB PCIe": 81_920,
    "NVIDIA L40S": 46_068,
    "NVIDIA L4": 23_034,
    "Tesla V100-SXM2-16GB": 16_384,
    "Tesla V100-SXM2-32GB": 32_768,
    "Tesla T4": 15_360,
}

UNITS = {"B": 1}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}

# What a plan leaves free. CUDA's context and the code of its libraries take 0.5 to 1 GiB on current cards, and cuBLAS
# and cuDNN want room to work in; the allocator's blocks are larger than the tensors in them, and leave gaps.
CONTEXT_BYTES = 1 * GIB
FRAGMENTATION_FRAC = 0.05


@dataclass(frozen=True)
class Budget:
    """Memory that a step may take.

    Attributes:
        total: bytes of the card, or as given.
        source: where that comes from, for people.
        context: bytes for CUDA itself; 0 where it has them already.
    """

    total: int
    source: str
    context: int = CONTEXT_BYTES

    @property
    def usable(self) -> int:
        """Bytes for tensors."""
        return max(0, int(self.total * (1 - FRAGMENTATION_FRAC)) - self.context)

    def describe(self) -> str:
        """What is left for tensors, and why."""
        context = f"{format_gib(self.context)} for CUDA's context and libraries and " if self.context else ""
        return (
            f"{format_gib(self.usable)} of {self.source} ({format_gib(self.total)}) are for tensors: {context}"
            f"{FRAGMENTATION_FRAC:.0%} for gaps between blocks are left free"
        )


def parse_budget(text: str) -> Budget:
    """A size such as "24GiB" or "24 GB", or the exact name of a card.

    Raises:
        ConfigError: for a size that is none.
        HardwareError: for a name that is not in the table.
    """
    if text in CARD_MEMORY_MIB:
        return Budget(CARD_MEMORY_MIB[text] * MIB, text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    if found and found[2] in units:
        total = int(float(found[1]) * units[found[2]])
        if total > 0:
            return Budget(total, text.strip())
    if found or not re.search("[A-Za-z]", text):
        raise ConfigError(
            f"--budget is {text!r}, which is no amount of memory. Give a number above 0 and a unit "
            f'({", ".join(UNITS)}), e.g. --budget 24GiB, or the exact name of a card, e.g. --budget "NVIDIA H200".'
        )
    near = difflib.get_close_matches(text, CARD_MEMORY_MIB, n=1, cutoff=0.5)
    raise HardwareError(
        f"--budget names the card {text!r}, whose memory is not known."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" Known: {', '.join(CARD_MEMORY_MIB)}. Give its memory instead, e.g. --budget 24GiB."
    )


def format_gib(num_bytes: int) -> str:
    """Bytes for people: GiB, or MiB below a tenth of one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.1f} MiB"
