"""The strategy object of Lightning that a hardware plan stands for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from leyden.hardware.plan import HardwarePlan
from leyden.sharding import mark_dealt, split_like, split_state, whole


class ShardedStrategy(ModelParallelStrategy):
    """Processes that hold parts of the weights, and write and read them whole.

    The processes are laid out in a mesh (data parallel, tensor parallel). A checkpoint is the same file as that of one
    process, so that any strategy reads those of any other. Lightning's own strategy does so too, but neither with a
    writer of checkpoints of the run's own nor for weights whose rows are dealt out (`leyden.sharding`).

    Args:
        data_parallel_size: parts that a batch is cut into.
        tensor_parallel_size: processes that take the same part of a batch.
    """

    def __init__(self, data_parallel_size: int, tensor_parallel_size: int) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.model is not None
        mark_dealt(self.model)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, whole, on the host; empty on all processes but the first."""
        module = self.lightning_module
        assert module is not None
        parameters = dict(module.named_parameters(remove_duplicate=False))
        found = {}
        for name, value in module.state_dict().items():
            full = whole(value, parameters.get(name))
            if self.is_global_zero:
                found[name] = full.cpu()
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this process's parts of the weights of a checkpoint."""
        module = self.lightning_module
        assert module is not None
        module.load_state_dict(split_state(module, checkpoint["state_dict"]), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's state, whole, on the host; empty on all processes but the first."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        parameters = _parameters(optimizer)
        packed = optimizer.state_dict()
        found: dict[int, dict[str, Any]] = {}
        for index, state in packed["state"].items():
            full = {k: whole(v, parameters[index]) if isinstance(v, Tensor) else v for k, v in state.items()}
            if self.is_global_zero:
                found[index] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in full.items()}
        return {**packed, "state": found} if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this process's parts of the optimisers' states of a checkpoint."""
        for optimizer, packed in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = _parameters(optimizer)
            state = {
                index: {k: split_like(v, parameters[index]) if isinstance(v, Tensor) else v for k, v in values.items()}
                for index, values in packed["state"].items()
            }
            optimizer.load_state_dict({**packed, "state": state})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes one file, by the first process."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of any strategy on each process."""
        loaded: dict[str, Any] = Strategy.load_checkpoint(self, checkpoint_path, weights_only)
        return loaded


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """In the order of the numbers that they have in an optimiser's state."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def build_strategy(plan: HardwarePlan, num_nodes: int = 1) -> str | Strategy:
    """What Lightning's Trainer takes as its strategy; on several machines layers are shared within each."""
    if not plan.is_sharded:
        return plan.strategy
    return ShardedStrategy(plan.data_parallel_size * num_nodes, plan.tensor_parallel_size)
