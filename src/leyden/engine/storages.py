"""Which storages of tensors live at which moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages from the operator that makes them until they are freed.

    Attributes:
        current: bytes at this moment.
        events: bytes that came (positive) or went, with the number of the storage, since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.events: list[tuple[int, int]] = []
        self._start = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.add(output)
        return output

    def add(self, values: Any) -> None:
        """Counts the storages of all tensors in a nested structure, each once."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                self._add_storage(tensor.untyped_storage())

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        number, self._count = self._count, self._count + 1
        self._known[key] = (weakref.ref(storage, lambda _: self._free(key, number, size)), number)
        self.current += size
        self.events.append((size, number))

    def _free(self, key: int, number: int, size: int) -> None:
        del self._known[key]
        self.current -= size
        self.events.append((-size, number))

    def begin(self) -> None:
        """Starts a part of the step."""
        self._start = self.current
        self.events.clear()

    def peak(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """The largest number of bytes since `begin`, and how many of them belong to these tensors, which still live."""
        numbers = {self._known[id(tensor.untyped_storage())][1] for tensor in tensors}
        level = best = self._start
        came = {number for size, number in self.events if number in numbers}
        mine = best_mine = sum(t.untyped_storage().nbytes() for t in tensors) - sum(
            size for size, number in self.events if number in came
        )
        for size, number in self.events:
            level += size
            mine += size if number in came else 0
            if level > best:
                best, best_mine = level, mine
        return best, best_mine
