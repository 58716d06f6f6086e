"""The `engine` section for a plain LightningModule, whose step is its own or Lightning's: what reaches it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from leyden.engine.settings import PLAIN_STEP, Engine
from leyden.errors import ConfigError

# Honoured through Lightning's Trainer
TRAINERS_OWN = ("precision", "deterministic")
# These too, but only where Lightning does the optimisation
AUTOMATIC_ONLY = ("accumulate_batches", "gradient_clip_norm", "gradient_clip_value")
# Values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{key: (value,) for key, value in vars(PLAIN_STEP).items()},
    "steps_per_execution": ("auto", 1),
    "micro_batch_size": (None, "auto"),
    "remember_micro_batch_size": (True, False),
    "compile": ("off", False),
}


def check_foreign(engine: Engine, task: LightningModule, name: str) -> None:
    """Refuses settings that would be without effect.

    Args:
        engine: the section.
        task: not one of Leyden's.
        name: its class, as the config says it.

    Raises:
        ConfigError: naming each of them, and the value that asks for nothing.
    """
    problems = []
    for key, value in vars(engine).items():
        reaches = key in TRAINERS_OWN or (key in AUTOMATIC_ONLY and task.automatic_optimization)
        if not reaches and value not in NEUTRAL[key]:
            neutral = NEUTRAL[key][0]
            problems.append(f"engine.{key}={value} (use {'null' if neutral is None else str(neutral).lower()})")
    if problems:
        step = "Lightning's" if task.automatic_optimization else "its own"
        raise ConfigError(
            f"{name} is a plain LightningModule with {step} optimisation step, which these settings do not reach: "
            f"{', '.join(problems)}. Take these values, or derive the module from leyden.engine.task.Task."
        )
    if engine.gradient_clip_norm is not None and engine.gradient_clip_value is not None:
        raise ConfigError(
            f"{name} is a plain LightningModule, for which Lightning clips by norm or by value, but both "
            "`engine.gradient_clip_norm` and `engine.gradient_clip_value` are set. Set one of them to null."
        )


def step_arguments(engine: Engine) -> dict[str, Any]:
    """The settings of the step as arguments of Lightning's Trainer."""
    by_value = engine.gradient_clip_value is not None
    return {
        "accumulate_grad_batches": engine.accumulate_batches,
        "gradient_clip_val": engine.gradient_clip_value if by_value else engine.gradient_clip_norm,
        "gradient_clip_algorithm": "value" if by_value else "norm",
    }
