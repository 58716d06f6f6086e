"""Tensors that several processes hold in parts (torch's DTensor): a process's own part, and the whole.

Belongs here: what turns the one into the other. Which module is cut how is said by its network (`parallel_plan`), and
done by `engine/parallel.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# Attribute of a module, and by `mark_dealt` of its parameters, whose rows lie in another order than in a checkpoint:
# (groups, processes), see `deal_rows`
DEALT = "_leyden_dealt"


def is_sharded(module: nn.Module) -> bool:
    """Whether a module has parameters that are held in parts."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory; the tensor itself where it is not in parts."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(value: Tensor, parameter: Tensor | None = None) -> Tensor:
    """All of a tensor, with its rows as checkpoints have them; all processes that hold parts have to call it.

    Args:
        value: in parts or not.
        parameter: the parameter that it is, or belongs to (as an optimiser's state does).
    """
    if not isinstance(value, DTensor):
        return value
    groups, size = getattr(parameter, DEALT, (1, 1))
    with torch.no_grad():
        return deal_rows(value.full_tensor(), size, groups)


def whole_of_part(part: Tensor, parameter: Tensor) -> Tensor:
    """As `whole`, for what lies as `own_part` of a parameter does."""
    if not isinstance(parameter, DTensor):
        return part
    value = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return whole(value, parameter)


def split_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Cuts a whole tensor as a parameter is cut: the reverse of `whole`. Each process gives the same tensor."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    groups, size = getattr(parameter, DEALT, (1, 1))
    rows = deal_rows(value, groups, size).to(parameter.device)
    return distribute_tensor(rows, parameter.device_mesh, parameter.placements, src_data_rank=None)


def split_state(module: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole state dict cut as a module's parameters are."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {n: split_like(v, parameters[n]) if n in parameters else v for n, v in state_dict.items()}


def mark_dealt(module: nn.Module) -> None:
    """Lets the parameters know how their rows were dealt, when a move to another device has replaced them."""
    for part in module.modules():
        if hasattr(part, DEALT):
            for parameter in part.parameters():
                setattr(parameter, DEALT, getattr(part, DEALT))


def deal_rows(tensor: Tensor, groups: int, size: int) -> Tensor:
    """Deals the rows of each of several groups out to `size` processes.

    The rows (groups, size, n) become (size, groups, n), so that the process with number r, which takes the r-th of
    `size` equal parts, has a part of each group: heads of queries, of keys and of values, for instance. With `groups`
    and `size` exchanged it is undone.

    Shape:
        (groups * size * n, ...) -> the same, rows in another order.
    """
    if groups == 1 or size == 1:
        return tensor
    return tensor.unflatten(0, (groups, size, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of several tensors together, whole or in parts. Shape: a scalar on their device."""
    norms = [torch.nn.utils.get_total_norm(kind) for kind in by_kind(tensors)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors that one operator takes together: those in parts over the same processes, and those that are whole."""
    kinds: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def all_finite(tensor: Tensor) -> Tensor:
    """Whether all values are finite, in all parts. Shape: a scalar, bool."""
    finite = tensor.detach().isfinite().all()
    return finite.full_tensor() if isinstance(finite, DTensor) else finite
