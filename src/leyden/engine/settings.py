"""The `engine` section of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

# A call of the training loop should take this long, so that the loop's own cost is small and the bar still moves.
TARGET_CALL_S = 0.05
MAX_STEPS_PER_CALL = 32

PRECISION_ALIASES = {"32": "32-true", "bf16": "bf16-true", "64": "64-true"}


@dataclass(frozen=True)
class Engine:
    """How an optimisation step is done.

    Args:
        precision: number format of the step. A format alone is that of the whole network: "32" is "32-true", "bf16"
            is "bf16-true", "64" is "64-true". "bf16-mixed" and "16-mixed" (GPU only) keep the weights in float32.
        accumulate_batches: batches whose samples make one optimiser step together.
        micro_batch_size: largest number of samples at a time on one device; null takes each batch whole. "auto" takes
            it whole while that fits, and halves it each time that memory runs out. It changes the memory a step needs,
            never its result (but for BatchNorm, which sees the part only, and other random numbers of dropout).
        remember_micro_batch_size: whether "auto" starts with the size that an earlier run of the experiment needed on
            the same device, and keeps what it finds.
        inject_out_of_memory_above: rehearses running out of memory: the backward pass of a micro-batch with more
            samples than this on one device fails as if there were no memory left; null never.
        steps_per_execution: optimiser steps that one call of the training loop takes; "auto" takes more where a step
            is so short that the loop would cost as much. Logging and validation stay where they are.
        gradient_clip_norm: largest L2 norm of the whole gradient; null does not clip.
        gradient_clip_value: largest absolute value of a gradient's element; null does not clip.
        ema_decay: share that an exponential moving average of the weights keeps at each step; the average is what is
            validated, tested and saved as best. null does not average.
        ema_start_step: optimiser steps before the average starts; until then the weights themselves count.
        non_finite: what a training loss that is not finite does: "stop" ends the run with the step and what is known
            of the cause; "skip" leaves a step out whose loss or gradient is not finite. The step counts for
            trainer.max_steps, but not for the schedule. On an accelerator "skip" makes the host wait for the device at
            every step.
        max_skipped_steps: largest number of steps in a row that are skipped; one more ends the run.
        compile: mode of torch.compile for the network: "default", "reduce-overhead" (CUDA graphs: for small steps on a
            GPU) or "max-autotune" (a long search for fast kernels); "off" does not compile.
        activation_checkpointing: whether the repeated blocks of the network compute their activations again for the
            gradient instead of keeping them: about a third more time for much less memory, and the same result.
        deterministic: whether to use only algorithms that give the same bits in each run.
    """

    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true", "32", "bf16", "64", 32, 64]
    accumulate_batches: Annotated[int, Ge(1)]
    micro_batch_size: Annotated[int, Ge(1)] | Literal["auto"] | None
    remember_micro_batch_size: bool
    inject_out_of_memory_above: Annotated[int, Ge(0)] | None
    steps_per_execution: Annotated[int, Ge(1)] | Literal["auto"]
    gradient_clip_norm: Annotated[float, Gt(0)] | None
    gradient_clip_value: Annotated[float, Gt(0)] | None
    ema_decay: Annotated[float, Ge(0), Lt(1)] | None
    ema_start_step: Annotated[int, Ge(0)]
    non_finite: Literal["stop", "skip"]
    max_skipped_steps: Annotated[int, Ge(1)]
    # YAML reads off without quotes as false
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", False]
    activation_checkpointing: bool
    deterministic: bool

    @classmethod
    def config_problems(cls, values: dict[str, Any]) -> list[str]:
        """Rules between keys that their types cannot say; `{key}` stands for the section."""
        problems = []
        if values.get("ema_decay") is None and values.get("ema_start_step"):
            problems.append(
                f"`{{key}}.ema_start_step` is {values['ema_start_step']}, but nothing is averaged, since "
                "`{key}.ema_decay` is null. Set {key}.ema_decay=0.999, or {key}.ema_start_step=0."
            )
        return problems

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.gradient_clip_norm is not None or self.gradient_clip_value is not None

    @property
    def number_format(self) -> str:
        """The precision under its full name."""
        return PRECISION_ALIASES.get(str(self.precision), str(self.precision))

    @property
    def compile_mode(self) -> str:
        """The mode of torch.compile, or "off"."""
        return str(self.compile or "off")

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a compiled network on a GPU gives its output in memory that its next call takes again."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    def choose_steps_per_call(
        self, step_time_s: float, intervals: Sequence[int], suits: Callable[[int], bool] = lambda steps: True
    ) -> int:
        """Optimiser steps of one call of the training loop.

        Args:
            step_time_s: measured time of one step.
            intervals: steps of an epoch between two points of the loss, two checkpoints, ...; a call ends at each.
            suits: whether a number of steps is allowed for another reason; one step always is.

        Returns:
            the largest number up to what is wanted that divides all intervals.
        """
        if isinstance(self.steps_per_execution, int):
            wanted = self.steps_per_execution
        else:
            wanted = min(MAX_STEPS_PER_CALL, max(1, int(TARGET_CALL_S / max(step_time_s, 1e-9))))
        interval = math.gcd(*intervals)
        divisors = [steps for steps in range(2, min(wanted, interval) + 1) if interval % steps == 0]
        return max(filter(suits, divisors), default=1)


# For a task that is used without a config.
PLAIN_STEP = Engine(
    precision="32-true",
    accumulate_batches=1,
    micro_batch_size=None,
    remember_micro_batch_size=True,
    inject_out_of_memory_above=None,
    steps_per_execution=1,
    gradient_clip_norm=None,
    gradient_clip_value=None,
    ema_decay=None,
    ema_start_step=0,
    non_finite="stop",
    max_skipped_steps=10,
    compile="off",
    activation_checkpointing=False,
    deterministic=False,
)
