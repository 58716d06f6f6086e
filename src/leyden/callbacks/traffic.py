"""What the processes of a run exchange, and how much of the network each holds; for proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leyden.sharding import own_part

NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional")
WAITS = ("wait_tensor", "barrier")


class CommunicationCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that collective operations are given.

    Attributes:
        num_bytes: so far; of an operation with inputs and outputs only the inputs count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES and not any(word in str(func) for word in WAITS):
            self.num_bytes += input_bytes(func, args)
        return func(*args, **(kwargs or {}))


def input_bytes(func: Any, args: Any) -> int:
    """Bytes of what one process puts into a collective operation."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    chosen = next((given[n] for n in ("input_tensors", "input_tensor", "input", "inputs", "self") if n in given), None)
    if chosen is None:  # an all-reduce or broadcast in place
        chosen = given.get("tensors", given.get("tensor"))
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(chosen) if isinstance(leaf, Tensor))


class Traffic(Callback):
    """Writes traffic_RANK.json in the run folder: parameter bytes held, and bytes exchanged per optimiser step.

    Every operation of a step goes through Python meanwhile, so that it is for proofs and not for every day.
    """

    def __init__(self) -> None:
        self._counter = CommunicationCounter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._counter.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = list(pl_module.parameters())
        parts = [p for p in parameters if isinstance(p, DTensor)]
        content = {
            "parameter_bytes": sum(own_part(p).nbytes for p in parameters),
            "part_bytes": sum(own_part(p).nbytes for p in parts),
            "parted_bytes": sum(p.numel() * p.element_size() for p in parts),
            "bytes_per_step": self._counter.num_bytes / max(1, trainer.global_step),
        }
        path = Path(trainer.default_root_dir) / f"traffic_{trainer.global_rank}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
