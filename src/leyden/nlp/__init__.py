"""Language: texts and their classes."""

from leyden.nlp.task import TextTask

__all__ = ["TextTask"]
