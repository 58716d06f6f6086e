"""The `engine` section of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class Engine:
    """How an optimisation step is done.

    Args:
        precision: number format of the step: "32-true", "bf16-mixed", "16-mixed" (GPU only) or "64-true".
        accumulate_batches: batches whose gradients are averaged before one optimiser step.
        gradient_clip_norm: largest L2 norm of the whole gradient; null does not clip.
        deterministic: whether to use only algorithms that give the same bits in each run.
    """

    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"]
    accumulate_batches: Annotated[int, Ge(1)]
    gradient_clip_norm: Annotated[float, Gt(0)] | None
    deterministic: bool
