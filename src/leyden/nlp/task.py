"""The text task: which class a text belongs to."""

from __future__ import annotations

from typing import ClassVar

from leyden.engine.classification import ClassificationTask


class TextTask(ClassificationTask):
    """Text classification; batches have `tokens` (B, L) int64 (0 is padding) and `label` (B,) int64."""

    input_key: ClassVar[str] = "tokens"
