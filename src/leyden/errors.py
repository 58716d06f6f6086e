"""The errors Leyden raises for its users; each message says what, where, what is allowed and what to do.

Errors in Leyden's own invariants are plain asserts, not these.
"""

from __future__ import annotations

from signal import Signals


class ConfigError(ValueError):
    """The configuration asks for something that cannot be; raised before any work is done."""


class HardwareError(RuntimeError):
    """The hardware that was asked for is not there or cannot do what was asked."""


class DataError(RuntimeError):
    """The data is missing, damaged or does not fit the configuration."""


class TrainingError(RuntimeError):
    """A run went wrong in a way that its numbers would not show (no steps, values that are not finite)."""


class ProcessError(RuntimeError):
    """One of the processes of a run failed or was killed.

    Args:
        message: which, and what is known of the reason.
        is_reported: whether the first process has said the same already.
    """

    def __init__(self, message: str, is_reported: bool = False) -> None:
        super().__init__(message)
        self.is_reported = is_reported


class Interrupted(BaseException):
    """The run was told to stop by a signal; not an error of the run, so nothing that handles errors handles it.

    Args:
        signal: which one.
        step: optimiser steps taken, where training had begun.

    Attributes:
        state: "interrupted" (by the user) or "terminated" (by the system), as run.json says it.
    """

    def __init__(self, signal: Signals, step: int | None = None) -> None:
        self.state = "interrupted" if signal is Signals.SIGINT else "terminated"
        super().__init__(f"{self.state} by {signal.name}")
        self.signal = signal
        self.step = step

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 130 or 143."""
        return 128 + self.signal


USER_ERRORS = (ConfigError, HardwareError, DataError, TrainingError)

# What libraries say where memory ran out but the kind of the error does not
OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "HIP out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # torch has freed its caches and tried again before
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on Windows
)


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left (torch need not be imported for this)."""
    if isinstance(err, USER_ERRORS):
        return False
    if isinstance(err, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(err).__mro__):
        return True
    return isinstance(err, RuntimeError) and any(text in str(err) for text in OUT_OF_MEMORY_TEXTS)
