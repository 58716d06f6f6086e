"""Regression: numbers from tables."""

from leyden.regression.task import RegressionTask

__all__ = ["RegressionTask"]
