"""Synchronization of buffers that training changes, such as running statistics, from rank zero to all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def list_shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training may change, by their names in ``state_dict``.

    Non-persistent buffers are left out, since they are derived from other values. So are masks, and all buffers of
    modules with weights packed into integers, such as quantised layers: they do not change and may be large.

    Args:
        model: the model, sharded or not; its buffers are unsharded on every rank.

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
    """Overwrite the buffers of :func:`list_shared_buffers` with those of rank zero, as DDP does; a collective.

    Args:
        model: the model, identical on all ranks.

    Source:
        ``broadcast_buffers`` of ``torch.nn.parallel.DistributedDataParallel``.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in dict.fromkeys(list_shared_buffers(model).values()):  # a buffer that two modules share, once
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in by_kind.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        if dist.get_rank() > 0:
            pieces = flat.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [piece.view_as(b) for piece, b in zip(pieces, buffers, strict=True)])


def leave_to_rank_zero(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the entries of a ``state_dict`` that this rank saves; buffers are saved by rank zero only.

    If several ranks offered an unsharded tensor, the writer would save any one of them.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        return dict(state)
    shared = list_shared_buffers(model)
    return {name: value for name, value in state.items() if name not in shared}
