"""Broadcast of rank zero's weights and buffers to all ranks, whatever they have built, also on the meta device."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_fasttrain.core.distributed import all_ranks, from_rank_zero, rank_count, rank_here
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.fsdp2.shard_blocks import is_opaque
from lightning_fasttrain.strategy.tensor_parallel.layouts import is_striped, take_shard

# Name, shape, dtype and requires_grad of each tensor, and digests of the quantised layers.
Description = tuple[list[tuple[str, tuple[int, ...], str, bool]], dict[str, list[float]]]


def tensors_on_rank_zero(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that rank zero will send, by reference; call it on all ranks, before the model is sharded.

    A model that rank zero too has built on the meta device is initialized first, by ``reset_parameters``. Parameters
    that are sharded already are not changed.

    Returns:
        Name → parameter or buffer, including non-persistent buffers; empty on other ranks.

    Raises:
        ValueError: ranks have built models with different names, shapes or dtypes, or quantised different weights; or
            rank zero has a layer on the meta device without a ``reset_parameters`` method.

    Example:
        >>> with torch.device("meta"):
        ...     net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> sorted({str(tensor.device) for tensor in tensors_on_rank_zero(net).values()})
        ['cpu']
    """
    if isinstance(model, FSDPModule):
        return {}
    first = from_rank_zero(lambda: _build_and_describe(model))
    # A rank that disagrees continues to the agreement below, where the others wait for it.
    error = _difference(_describe(model), first)
    if not all_ranks().agree(error is None):
        another = explain("another rank has refused its model", "see its error", "Build the same model on every rank")
        raise ValueError(error or another)
    return _tensors(model) if rank_here() == 0 else {}


def send_from_rank_zero_(
    model: nn.Module, whole: dict[str, Tensor], device: torch.device, home: torch.device | None = None
) -> None:
    """Give every rank of a sharded model its shards of rank zero's weights, one tensor at a time.

    Args:
        model: the model, sharded by :func:`~lightning_fasttrain.strategy.shard_blocks_` identically on all ranks.
        whole: the result of :func:`tensors_on_rank_zero`; it is emptied, which frees memory on the way.
        device: device on which the ranks communicate.
        home: device of the shards; by default ``device``.
    """
    if any_meta(_tensors(model).values()):
        _allocate_(model, device, home or device)
    with torch.no_grad():
        for name, target in _tensors(model).items():
            # Popped, so that each whole tensor is freed when it has been sent.
            full = whole.pop(name, None)
            if full is None:
                full = torch.empty(target.shape, dtype=target.dtype, device=device)
            full = full.detach()
            if isinstance(target, DTensor):
                # 4-bit weights are of bitsandbytes' own class.
                full = full.as_subclass(Tensor)
            full = full.to(device).contiguous()
            if is_striped(target):
                dist.broadcast(full, src=0)
                target.to_local().copy_(take_shard(full, target).to_local())
            elif isinstance(target, DTensor):
                # A collective: rank zero scatters, the others receive.
                parts = distribute_tensor(full, target.device_mesh, target.placements)
                target.to_local().copy_(parts.to_local())
            elif not _agrees(target):
                dist.broadcast(full, src=0)
                target.copy_(full)


def _agrees(tensor: Tensor) -> bool:
    """Return whether a tensor is quantised and unsharded: :func:`tensors_on_rank_zero` has checked that ranks agree."""
    return isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor) and is_opaque(tensor)


def _allocate_(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Allocate memory for all tensors that rank zero sends, the shards on ``home``; keep those it does not send."""
    # to_empty would erase the values of quantised weights, which are not sent.
    kept = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and _agrees(parameter):
                kept.append((module, key, parameter))
    for module, key, _ in kept:
        module._parameters[key] = None
    model.to_empty(device=home)
    for module, key, parameter in kept:
        module._parameters[key] = parameter
    # FSDP2 does not offload buffers: they are used on the device.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def any_meta(tensors: Iterable[Tensor]) -> bool:
    """Return whether a tensor is on the meta device, so that it has no values."""
    return any(tensor.is_meta for tensor in tensors)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _build_and_describe(model: nn.Module) -> Description:
    """Initialize the layers that are on the meta device in host memory, and describe the model."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places.setdefault(parameter, []).append((module, key))
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any_meta(own):
            continue
        lost = [key for key in module._non_persistent_buffers_set if getattr(module, key).is_meta]
        reset: Any = getattr(module, "reset_parameters", None)
        if lost or not callable(reset):
            what = f"layer '{name}' ({type(module).__name__}) is on the meta device"
            why = "it has no reset_parameters method"
            if lost:
                why = f"the values of its buffer '{lost[0]}' are lost"
            way_out = "Build it on rank zero outside of init_module, or add a reset_parameters method"
            raise ValueError(explain(what, why, way_out))
        module.to_empty(device="cpu", recurse=False)
        reset()
    # Tied parameters have become separate ones, so they are tied again.
    for (first, name), *others in places.values():
        for module, key in others:
            module._parameters[key] = first._parameters[name]
    return _describe(model)


def _describe(model: nn.Module) -> Description:
    """Describe what must be identical on all ranks: names, shapes and dtypes, and the values of quantised layers."""
    digests = {}
    for name, layer in model.named_modules():
        if any(map(is_opaque, layer.parameters(recurse=False))):
            digests[name] = _digest(layer)
    tensors = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in _tensors(model).items()]
    return tensors, digests


def _digest(layer: nn.Module) -> list[float]:
    # Two sums per tensor instead of all its values, since the digest is sent to every rank.
    digest = []
    for value in layer.state_dict().values():
        if isinstance(value, Tensor) and not value.is_meta:
            precise = value.double()
            digest += [float(precise.sum()), float(precise.square().sum())]
    return digest


def _difference(mine: Description, first: Description) -> str | None:
    rank = rank_here()
    if mine[0] != first[0]:
        names = sorted({entry[0] for entry in {*mine[0]} ^ {*first[0]}}) or ["their order"]
        why = "shards of different models cannot be combined"
        way_out = "Build the same layers, in the same order, on every rank"
        return explain(f"rank {rank} has built another model than rank 0: {', '.join(names[:4])}", why, way_out)
    for name, digest in first[1].items():
        if mine[1][name] != digest:
            return explain(
                f"rank {rank} has quantised other weights than rank 0 in '{name}'",
                "their quantization constants are replicated on every rank, so they must be identical from the start",
                "Load the same pretrained weights on every rank, or call seed_everything() before the model is built",
            )
    return None


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
        tables = {buffer for buffer in own.values() if buffer.ndim > 1 and not buffer.is_floating_point()}
        if any(table.dtype is not torch.bool for table in tables):
            continue
        for name, buffer in own.items():
            if name not in module._non_persistent_buffers_set and buffer not in tables:
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
    if rank_count() == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    # A buffer that two modules share is sent once.
    for buffer in dict.fromkeys(list_shared_buffers(model).values()):
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in by_kind.values():
        flat = torch.cat(list(map(torch.flatten, buffers)))
        dist.broadcast(flat, src=0)
        if rank_here() > 0:
            received = flat.split(list(map(Tensor.numel, buffers)))
            torch._foreach_copy_(buffers, list(map(Tensor.view_as, received, buffers)))


def leave_to_rank_zero(state: Mapping[str, object], model: nn.Module) -> dict[str, Any]:
    """Return the entries of a ``state_dict`` that this rank saves; buffers are saved by rank zero only.

    If several ranks offered an unsharded tensor, the writer would save any one of them.
    """
    if rank_here() == 0:
        return dict(state)
    return without(state, list_shared_buffers(model))
