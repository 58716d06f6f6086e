"""Something that one process notices is done by all at the same place of the run, without a collective operation.

A signal or a clock reaches processes at different times, but what they then do (saving) takes all of them. Places are
the points of a run that all processes pass in the same order, with an exchange of gradients or metrics between two of
them. Who notices at place n writes n + 1 into the store at which the processes met; who reaches a place looks there.
No process can have left n + 1 before: it would have had to exchange with the one that was still at n. A look is a
question over a socket, of some ten microseconds; the device is not waited for.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import PrefixStore, Store


class Agreement:
    """When all processes do one thing; alone, a process does it at once.

    Args:
        topic: its name, the same in all processes.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._place = 0
        self._round = 0
        self._has_asked = False

    def decide(self, wish: int | None) -> int | None:
        """Call it at each place.

        Args:
            wish: a number that this process wants all to have, or None.

        Returns:
            the number that was agreed on, at the same place for all; None where nothing is to be done yet.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return wish
        store, key = self._store(), str(self._round)
        if wish is not None and not self._has_asked:
            store.compare_set(key, "", f"{self._place + 1} {wish}")
            self._has_asked = True
        agreed = None
        if store.check([key]):
            place, number = map(int, store.get(key).split())
            assert self._place <= place, f"process {dist.get_rank()} was not at place {place} of {self.topic}"
            if self._place == place:
                agreed = number
                self._round += 1
                self._has_asked = False
        self._place += 1
        return agreed

    def _store(self) -> Store:
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore(f"leyden/agreement/{self.topic}", _get_default_store())
