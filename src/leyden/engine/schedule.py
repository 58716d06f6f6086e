"""Learning-rate schedules as pure functions of the optimiser step.

Each gives a factor in 0 .. 1 for `optim.lr`. Steps count from 0 to total_steps - 1: the peak factor 1 is reached
at the step where warm-up ends and the final factor at the last step, whatever the accumulation or world size.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from annotated_types import Ge, Le, Lt

Fraction = Annotated[float, Ge(0), Le(1)]


class Schedule:
    """A schedule with linear warm-up.

    Args:
        warmup_steps: optimiser steps of warm-up.
        warmup_frac: the same as a share of all steps; give only one of the two.
    """

    def __init__(
        self, warmup_steps: Annotated[int, Ge(0)] = 0, warmup_frac: Annotated[float, Ge(0), Lt(1)] = 0.0
    ) -> None:
        self.warmup_steps = warmup_steps
        self.warmup_frac = warmup_frac

    @classmethod
    def config_problems(cls, values: dict[str, Any]) -> list[str]:
        """Rules between keys that their types cannot say; `{key}` stands for the section."""
        if values.get("warmup_steps") and values.get("warmup_frac"):
            return ["`{key}.warmup_steps` and `{key}.warmup_frac` both ask for warm-up. Set one of them to 0."]
        return []

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps before the peak; at least one step stays for the peak itself."""
        steps = self.warmup_steps or round(self.warmup_frac * total_steps)
        return min(steps, total_steps - 1)

    def factor(self, step: int, total_steps: int) -> float:
        """The factor for `optim.lr` at an optimiser step (0 .. total_steps - 1)."""
        warmup = self.num_warmup_steps(total_steps)
        if step < warmup:
            return self.rise((step + 1) / (warmup + 1))
        # 0 at the peak, 1 at the last step; a step beyond the plan keeps the final value
        return self.fall(min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup)))

    def rise(self, progress: float) -> float:
        """Factor during warm-up, from `progress` just above 0 to just below 1."""
        return progress

    def fall(self, progress: float) -> float:
        """Factor from the peak (`progress` 0) to the last step (`progress` 1)."""
        raise NotImplementedError


class Constant(Schedule):
    """The full rate after warm-up."""

    def fall(self, progress: float) -> float:
        return 1.0


class Cosine(Schedule):
    """Half a cosine from the full rate down to `final_frac` of it.

    Source: Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts.
    """

    def __init__(
        self,
        warmup_steps: Annotated[int, Ge(0)] = 0,
        warmup_frac: Annotated[float, Ge(0), Lt(1)] = 0.0,
        final_frac: Fraction = 0.0,
    ) -> None:
        super().__init__(warmup_steps, warmup_frac)
        self.final_frac = final_frac

    def fall(self, progress: float) -> float:
        return _half_cosine(1.0, self.final_frac, progress)


class OneCycle(Cosine):
    """Half a cosine up from `initial_frac` during warm-up, then half a cosine down to `final_frac`.

    Source: Smith & Topin 2018, https://arxiv.org/abs/1708.07120, with cosine parts and fixed momentum.
    """

    def __init__(
        self,
        warmup_steps: Annotated[int, Ge(0)] = 0,
        warmup_frac: Annotated[float, Ge(0), Lt(1)] = 0.3,
        initial_frac: Fraction = 0.04,
        final_frac: Fraction = 0.0,
    ) -> None:
        super().__init__(warmup_steps, warmup_frac, final_frac)
        self.initial_frac = initial_frac

    def factor(self, step: int, total_steps: int) -> float:
        warmup = self.num_warmup_steps(total_steps)
        if step < warmup:  # the first step starts exactly at initial_frac
            return _half_cosine(self.initial_frac, 1.0, step / warmup)
        return super().factor(step, total_steps)


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
