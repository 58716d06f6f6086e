"""All processes stop at one place, whichever was told and when."""

from __future__ import annotations

import random
import threading

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from leyden.callbacks.agreement import Agreement


def test_a_process_alone_does_it_at_once() -> None:
    agreement = Agreement("stop")
    assert [agreement.decide(wish) for wish in (None, 15, None)] == [None, 15, None]


@pytest.mark.parametrize("seed", range(20))
def test_all_decide_at_the_same_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes as threads, each told at another moment; between two places they exchange (a barrier)."""
    choice = random.Random(seed)
    count, num_places = 3, 12
    store, barrier = HashStore(), threading.Barrier(count)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: count)
    monkeypatch.setattr(Agreement, "_store", lambda self: store)
    told = {rank: choice.choice([None, choice.randrange(num_places - 3)]) for rank in range(count)}
    decided: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(count)}

    def run(rank: int) -> None:
        agreement, mine = Agreement("stop"), random.Random((seed, rank).__hash__())
        asked = False
        for place in range(num_places):
            threading.Event().wait(mine.random() / 500)
            due = told[rank] is not None and place >= told[rank] and not asked
            number = agreement.decide(15 + rank if due else None)
            if number is not None:
                decided[rank].append((place, number))
                asked = True
            barrier.wait(timeout=30)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = min((place for place in told.values() if place is not None), default=None)
    assert decided[0] == decided[1] == decided[2]
    if first is None:
        assert not decided[0]
    else:
        assert decided[0][0][0] == first + 1  # one place after the first was told
