"""Vision: images and their classes."""

from leyden.vision.task import VisionTask

__all__ = ["VisionTask"]
