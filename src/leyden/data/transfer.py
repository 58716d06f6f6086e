"""Copying batches to a GPU while it computes on the ones before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Item = list[dict[str, Tensor]]


def copy_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Hands out items on a CUDA device; the next one is gathered and copied on a stream of its own meanwhile.

    The host's copy is pinned, or it would have to wait for the transfer.
    """
    stream = torch.cuda.Stream(device)

    def start() -> Item | None:
        item = next(items, None)
        if item is None:
            return None
        with torch.cuda.stream(stream):
            return [{name: _copy(tensor, device) for name, tensor in batch.items()} for batch in item]

    ahead = start()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for batch in ahead:
            for tensor in batch.values():
                tensor.record_stream(current)  # or its memory could be given away while this stream still reads it
        item, ahead = ahead, start()
        yield item


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device == device else tensor.pin_memory().to(device, non_blocking=True)
