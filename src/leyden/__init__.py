"""Leyden: PyTorch experiments from one Hydra config, on whatever hardware there is.

The public names are imported when they are first used, so that `import leyden` does not load torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ClassificationTask": "leyden.engine.classification",
    "ConfigError": "leyden.errors",
    "DataError": "leyden.errors",
    "DataModule": "leyden.data.datamodule",
    "HardwareError": "leyden.errors",
    "Task": "leyden.engine.task",
    "TrainingError": "leyden.errors",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'leyden' has no attribute '{name}'")
