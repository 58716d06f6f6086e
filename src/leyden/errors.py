"""The errors Leyden raises for its users; each message says what, where, what is allowed and what to do.

Errors in Leyden's own invariants are plain asserts, not these.
"""


class ConfigError(ValueError):
    """The configuration asks for something that cannot be; raised before any work is done."""


class HardwareError(RuntimeError):
    """The hardware that was asked for is not there or cannot do what was asked."""


class DataError(RuntimeError):
    """The data is missing, damaged or does not fit the configuration."""


class TrainingError(RuntimeError):
    """A run went wrong in a way that its numbers would not show (no steps, values that are not finite)."""


USER_ERRORS = (ConfigError, HardwareError, DataError, TrainingError)
