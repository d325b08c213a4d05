"""Buffers that training changes, such as running statistics: every rank is given those of rank zero."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def list_shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the model's state, by their names in ``state_dict``.

    What is not saved is made from something else and changes with it. Masks, and what modules hold beside weights that
    are packed into whole numbers, as quantised layers do, do not change and may be large: they are left out.

    Args:
        model: sharded or not; its buffers are whole on every rank.

    Example:
        >>> list(list_shared_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        tables = [buffer for buffer in own.values() if buffer.ndim > 1 and not buffer.is_floating_point()]
        if any(table.dtype is not torch.bool for table in tables):
            continue
        for name, buffer in own.items():
            if name not in module._non_persistent_buffers_set and not any(buffer is table for table in tables):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@torch.no_grad()
def share_buffers_(model: nn.Module) -> None:
    """Overwrite :func:`list_shared_buffers` with those of rank zero, as DDP does before a forward; a collective.

    Args:
        model: the same on all ranks.

    Source:
        ``broadcast_buffers`` of ``torch.nn.parallel.DistributedDataParallel``.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in dict.fromkeys(list_shared_buffers(model).values()):  # one that two modules share once
        alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in alike.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        if dist.get_rank() > 0:
            pieces = flat.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [piece.view_as(b) for piece, b in zip(pieces, buffers, strict=True)])


def leave_to_rank_zero(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """What this rank saves of a ``state_dict``: of buffers, of which each rank has a copy, rank zero's are taken.

    Where several ranks offer a tensor that is whole, the writer takes any one of them.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        return dict(state)
    shared = list_shared_buffers(model)
    return {name: value for name, value in state.items() if name not in shared}
