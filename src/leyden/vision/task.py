"""The vision task: which class an image shows."""

from __future__ import annotations

from typing import ClassVar

from leyden.engine.classification import ClassificationTask


class VisionTask(ClassificationTask):
    """Image classification; batches have `image` (B, C, H, W) float32 and `label` (B,) int64."""

    input_key: ClassVar[str] = "image"
