"""A task on several processes that hold parts of its network: fully sharded, tensor parallel, or both.

In pseudocode, with a mesh of processes (data parallel, tensor parallel)::

    for module, cut in net.parallel_plan():   cut its weights over the tensor parallel processes
    for block in net.repeated_blocks, net:    fully_shard over the data parallel processes

Processes that are tensor parallel take the same samples and the same random numbers, and sums over all samples are
taken over the data parallel processes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from leyden.engine.settings import Engine
from leyden.errors import ConfigError
from leyden.nets.plan import Plan
from leyden.sharding import DEALT, by_kind, deal_rows, is_sharded, own_part

if TYPE_CHECKING:
    from leyden.engine.task import Task

log = logging.getLogger(__name__)

NO_FUSED_PARTS = (torch.optim.SGD, torch.optim.Adagrad)  # torch 2.14
QKV = 3  # queries, keys and values lie one after the other in the rows of a fused Linear


def shard(task: Task) -> None:
    """Cuts the network of a task as the trainer's strategy says, once; other strategies leave it whole."""
    strategy = task.trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy) or is_sharded(task.net):
        return
    num_bytes = own_bytes(task.net)
    mesh = strategy.device_mesh
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        _apply_plan(task.net, tensor)
    if data.size() > 1:
        _shard_fully(task.net, data)
    for module in task.modules():
        if isinstance(module, Metric):
            module.process_group = data.get_group()
    task.waits_for_all = data.size() > 1
    log.info("Weights: this process holds %s of %s bytes.", f"{own_bytes(task.net):,}", f"{num_bytes:,}")


def _apply_plan(net: nn.Module, mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {}
    for name, cut in plan_of(net).items():
        module = net.get_submodule(name)
        if cut == "dropout":
            _cut_dropout(module, mesh.get_local_rank(), mesh.size())
            continue
        if cut == "qkv":
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(deal_rows(parameter, QKV, mesh.size()))
            setattr(module, DEALT, (QKV, mesh.size()))
        styles[name] = RowwiseParallel() if cut == "row" else ColwiseParallel()
    parallelize_module(net, mesh, styles)


def cut_layers(net: nn.Module, size: int) -> None:
    """Leaves of a network's layers what one of `size` tensor parallel processes holds, without these processes.

    Its output is no longer right, but as large as theirs: for planning.
    """
    for name, cut in plan_of(net).items():
        module = net.get_submodule(name)
        if cut == "dropout":
            _cut_dropout(module, 0, size)
            continue
        axis = 1 if cut == "row" else 0
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > axis:
                own = parameter.detach().chunk(size, axis)[0].clone()
                setattr(module, key, nn.Parameter(own, parameter.requires_grad))


def _cut_dropout(module: nn.Module, rank: int, size: int) -> None:
    assert isinstance(module, nn.Dropout)
    own = partial(_drop_own_part, module, rank, size)
    module.forward = own  # type: ignore[method-assign]


def _drop_own_part(dropout: nn.Dropout, rank: int, size: int, features: Tensor) -> Tensor:
    """Dropout of a process's part of the last axis, with the mask that one process would draw for all of it."""
    if not dropout.training or dropout.p == 0:
        return features
    width = features.shape[-1]
    every = torch.ones((*features.shape[:-1], width * size), dtype=features.dtype, device=features.device)
    mask = nn.functional.dropout(every, dropout.p)
    # A copy, so that what is kept for the gradient is not the whole mask
    return features * mask[..., rank * width : (rank + 1) * width].contiguous()


def _shard_fully(net: nn.Module, mesh: DeviceMesh) -> None:
    cut = partial(_choose_axis, size=mesh.size())
    blocks = getattr(net, getattr(net, "repeated_blocks", ""), None)
    for block in blocks.children() if isinstance(blocks, nn.Module) else ():
        fully_shard(block, mesh=mesh, shard_placement_fn=cut)
    # Also the root's weights go back to parts after a forward pass: between two steps all that is seen are parts
    fully_shard(net, mesh=mesh, reshard_after_forward=True, shard_placement_fn=cut)


def _choose_axis(parameter: nn.Parameter, size: int) -> Shard | None:
    """The axis that `size` processes cut: the first, but another where that is too short, as of embedded positions."""
    if isinstance(parameter, DTensor) or parameter.shape[0] >= size:
        return None
    longest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis])
    return Shard(longest) if parameter.shape[longest] % size == 0 else None


def plan_of(net: nn.Module) -> Plan:
    """The network's own plan.

    Raises:
        ConfigError: when it has none.
    """
    own: Callable[[], Plan] | None = getattr(net, "parallel_plan", None)
    plan = own() if callable(own) else {}
    if not plan:
        raise ConfigError(
            f"`hardware.strategy` is tensor parallel, but `model.net` ({_kind(net)}) does not say how it is cut. Give "
            'the class a method parallel_plan() that names its Linears, e.g. {"first": "column", "second": "row"} '
            "(docs/parallel.md), or use hardware=fsdp."
        )
    return plan


def _kind(net: nn.Module) -> str:
    return f"{type(net).__module__}.{type(net).__name__}"


def check_sharding(net: nn.Module, engine: Engine, data_parallel_size: int, tensor_parallel_size: int) -> None:
    """Checks, before training, that a network and its step can be done by processes that hold parts of it.

    Raises:
        ConfigError: naming the setting, and what to use instead.
    """
    if engine.compile_mode != "off":
        raise ConfigError(
            f"`engine.compile` is {engine.compile_mode}, which does not go with a network that is held in parts. Use "
            "engine.compile=off, or hardware=ddp."
        )
    if engine.number_format == "16-mixed":
        raise ConfigError(
            "`engine.precision` is 16-mixed, whose loss scale does not go with a network that is held in parts. Use "
            "engine.precision=bf16-mixed, or hardware=ddp."
        )
    if tensor_parallel_size > 1:
        _check_plan(net, tensor_parallel_size)
    if data_parallel_size > 1:
        if engine.micro_batch_size == 1:
            raise ConfigError(
                "`engine.micro_batch_size` is 1, but fully sharded processes take equally many micro-batches of a "
                "step, which batches of uneven size do not have. Use engine.micro_batch_size=2 or more."
            )
        norm = next((name for name, module in net.named_modules() if isinstance(module, _BatchNorm)), None)
        if norm is not None:
            raise ConfigError(
                f"`model.net` ({_kind(net)}) has a BatchNorm (`{norm}`), whose running statistics would differ between "
                "fully sharded processes. Use a network with GroupNorm or LayerNorm, or hardware=ddp."
            )


def explain_batch_norm(net: nn.Module, strategy: str, is_synced: bool) -> None:
    """Says what several data parallel processes make of a network's BatchNorm."""
    norm = next((name for name, module in net.named_modules() if isinstance(module, _BatchNorm)), None)
    if norm is None or strategy != "ddp":
        return
    if is_synced:
        log.info("BatchNorm (`%s`) takes its statistics over all processes, as one process would.", norm)
        return
    log.warning(
        "`model.net` (%s) has a BatchNorm (`%s`), which sees each process's part of a batch only, so the result is "
        "another than that of one process. On GPUs it sees the whole; a network with GroupNorm or LayerNorm does not "
        "depend on it.",
        _kind(net),
        norm,
    )


def _check_plan(net: nn.Module, size: int) -> None:
    modules = dict(net.named_modules())
    for name, cut in plan_of(net).items():
        parent, _, _ = name.rpartition(".")
        module = modules.get(name)
        wanted = nn.Dropout if cut == "dropout" else nn.Linear
        if not isinstance(module, wanted):
            found = f"is a {type(module).__name__}" if module is not None else "is not there"
            raise ConfigError(
                f"`model.net` ({_kind(net)}): its parallel_plan() names `{name}` as {cut!r}, which must be a "
                f"{wanted.__name__}, but {found}. Correct the plan (docs/parallel.md), or use hardware=fsdp."
            )
        if not isinstance(module, nn.Linear):
            continue
        if cut == "qkv":
            count, what = int(net.get_submodule(parent).num_heads), "attention heads"  # type: ignore[arg-type]
        elif cut == "column":
            count, what = module.out_features, "outputs"
        else:
            count, what = module.in_features, "inputs"
        if count % size:
            key = "model.net.num_heads" if cut == "qkv" else "the width under model.net"
            raise ConfigError(
                f"`hardware.strategy`: {size} tensor parallel processes cannot share the {count} {what} of `{name}` in "
                f"`model.net` ({_kind(net)}) evenly. Change {key} to a multiple of {size}, or take fewer devices."
            )


def step_by_kind(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimiser that takes many weights in one call not mix those in parts with whole ones.

    `optim.fused` and `optim.foreach` work on a parameter group as a whole, for which tensor parallel has weights of
    both kinds (torch 2.14). For the time of a step each kind is a group of its own; checkpoints see the groups as they
    are.

    Raises:
        ConfigError: when the one call is not there for weights in parts.
    """
    groups = optimizer.param_groups
    in_parts = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    if in_parts and isinstance(optimizer, NO_FUSED_PARTS) and any(group["fused"] for group in groups):
        raise ConfigError(
            f"`optim.fused` is true, which torch's {type(optimizer).__name__} does not have for a network that is held "
            "in parts. Use optim.fused=false, or optim=adamw."
        )
    if not any((g.get("fused") or g.get("foreach")) and len(by_kind(g["params"])) > 1 for g in groups):
        return
    held: list[list[dict[str, Any]]] = []

    def divide(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held.append(optimizer.param_groups)
        optimizer.param_groups = [
            {**group, "params": kind} for group in optimizer.param_groups for kind in by_kind(group["params"])
        ]

    def unite(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups = held.pop()

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(unite)


def fetched_bytes(net: nn.Module) -> int:
    """Bytes of the weights that a fully sharded process fetches and holds whole at a time.

    That is what is in no block, the block that computes, and the next one, which is fetched meanwhile.
    """
    module = getattr(net, getattr(net, "repeated_blocks", ""), None)
    blocks = [own_bytes(block) for block in module.children()] if isinstance(module, nn.Module) else []
    return own_bytes(net) - sum(blocks) + sum(sorted(blocks)[-2:])


def own_bytes(net: nn.Module) -> int:
    """Bytes of a network's parameters that this process holds."""
    return sum(part.numel() * part.element_size() for part in map(own_part, net.parameters()))
