"""How a network is cut for tensor parallel training: the words of a `parallel_plan`.

A network's method `parallel_plan()` gives the names of its modules with one of these words; modules that are not named
stay whole on each process. `engine/parallel.py` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

# "column": a Linear whose outputs are shared out; each process has some of its rows of weights.
# "qkv": the same for the fused queries, keys and values of attention; each process has some heads of each.
# "row": a Linear that takes what "column" or "qkv" gives; its outputs are added up over the processes.
# "dropout": a Dropout between the two, whose mask is drawn for all features.
Cut = Literal["column", "qkv", "row", "dropout"]
Plan = dict[str, Cut]


def plan_layers(layers: Sequence[tuple[str, str | None]]) -> Plan:
    """The plan of Linears one after the other: each second takes up what the one before shares out.

    Args:
        layers: name of each Linear, and of the Dropout after it. An odd last one stays whole.
    """
    plan: Plan = {}
    for (first, dropout), (second, _) in zip(layers[::2], layers[1::2], strict=False):
        plan[first] = "column"
        if dropout is not None:
            plan[dropout] = "dropout"
        plan[second] = "row"
    return plan
