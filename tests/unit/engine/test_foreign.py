"""Settings of the step that a plain LightningModule cannot have are refused; the others reach it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

from leyden.engine.foreign import NEUTRAL, check_foreign, step_arguments
from leyden.engine.settings import PLAIN_STEP
from leyden.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"micro_batch_size": 8}, "engine.micro_batch_size=8 (use null)"),
        ({"steps_per_execution": 4}, "engine.steps_per_execution=4 (use auto)"),
        ({"ema_decay": 0.9, "ema_start_step": 5}, "engine.ema_decay=0.9 (use null), engine.ema_start_step=5 (use 0)"),
        ({"non_finite": "skip"}, "engine.non_finite=skip (use stop)"),
        ({"compile": "default"}, "engine.compile=default (use off)"),
        ({"activation_checkpointing": True}, "engine.activation_checkpointing=True (use false)"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_foreign(replace(PLAIN_STEP, **changes), BoringModel(), "my.Module")
    assert str(caught.value) == (
        "my.Module is a plain LightningModule with Lightning's optimisation step, which these settings do not reach: "
        f"{named}. Take these values, or derive the module from leyden.engine.task.Task."
    )


def test_what_asks_for_nothing_or_reaches_the_trainer_is_taken() -> None:
    engine = replace(PLAIN_STEP, steps_per_execution="auto", compile=False, precision="bf16-mixed", deterministic=True)
    check_foreign(engine, BoringModel(), "my.Module")
    check_foreign(engine, ManualOptimBoringModel(), "my.Module")
    engine = replace(engine, accumulate_batches=4, gradient_clip_value=0.5)
    check_foreign(engine, BoringModel(), "my.Module")
    assert step_arguments(engine) == {
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "value",
    }
    assert step_arguments(replace(PLAIN_STEP, gradient_clip_norm=2.0)) == {
        "accumulate_grad_batches": 1,
        "gradient_clip_val": 2.0,
        "gradient_clip_algorithm": "norm",
    }


def test_own_step_of_a_module_takes_neither_accumulation_nor_clipping() -> None:
    engine = replace(PLAIN_STEP, accumulate_batches=4, gradient_clip_norm=1.0)
    with pytest.raises(ConfigError, match=r"its own optimisation step.*accumulate_batches=4 \(use 1\), engine"):
        check_foreign(engine, ManualOptimBoringModel(), "my.Module")


def test_two_kinds_of_clipping_are_refused() -> None:
    engine = replace(PLAIN_STEP, gradient_clip_norm=1.0, gradient_clip_value=0.5)
    with pytest.raises(ConfigError, match=r"both `engine\.gradient_clip_norm` and `engine\.gradient_clip_value` are"):
        check_foreign(engine, BoringModel(), "my.Module")


def test_each_key_of_the_section_has_a_value_that_asks_for_nothing() -> None:
    assert NEUTRAL.keys() == vars(PLAIN_STEP).keys()
