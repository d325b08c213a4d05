"""Every rank begins with the weights of rank zero, whatever it has built: others, or none (the meta device)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_fasttrain.core.distributed import rank_here
from lightning_fasttrain.core.files.checkpoint_folder import agree_on_all_ranks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.fsdp2._packed_weights import is_opaque


def whole_on_rank_zero(model: nn.Module) -> dict[str, Tensor]:
    """What rank zero will send, by reference; call it on all ranks, before the model is sharded.

    Rank zero gives a model that it too has built on the meta device its weights first, by ``reset_parameters``.
    Parameters that are sharded already stay as they are.

    Returns:
        Name → parameter or buffer, also those that ``state_dict`` leaves out; empty on other ranks.

    Raises:
        ValueError: ranks have built models of other names, shapes or dtypes, or quantised other weights; or rank zero
            has a layer without weights that does not say how to make them.

    Example:
        >>> with torch.device("meta"):
        ...     net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> sorted({str(tensor.device) for tensor in whole_on_rank_zero(net).values()})
        ['cpu']
    """
    if isinstance(model, FSDPModule):
        return {}
    rank = rank_here()
    error = _build_(model) if rank == 0 else None
    first: list[Any] = [None if error else _description(model)]  # None tells the others that rank zero failed
    if dist.is_initialized():
        dist.broadcast_object_list(first, src=0)
    if first[0] is not None:
        # A rank that disagrees goes on to the common answer, or the others would wait for it.
        error = _difference(_description(model), first[0], rank)
    if not agree_on_all_ranks(error is None and first[0] is not None):
        another = explain("another rank refused its model", "see its error", "Build the same model on every rank")
        raise ValueError(error or another)
    return _tensors(model) if rank == 0 else {}


def send_from_rank_zero_(
    model: nn.Module, whole: dict[str, Tensor], device: torch.device, home: torch.device | None = None
) -> None:
    """Give every rank of a sharded model its part of rank zero's weights, one tensor at a time.

    Args:
        model: sharded by :func:`~lightning_fasttrain.strategy.shard_blocks_`, on all ranks alike.
        whole: of :func:`whole_on_rank_zero`; emptied, so that memory is freed on the way.
        device: where the ranks communicate.
        home: where the shards live, if not there.
    """
    if any(tensor.is_meta for tensor in _tensors(model).values()):
        _make_room_(model, device, home or device)
    with torch.no_grad():
        for name, target in _tensors(model).items():
            full = whole.pop(name, None)  # popped: each whole tensor is freed when it has been sent
            full = torch.empty(target.shape, dtype=target.dtype, device=device) if full is None else full.detach()
            if isinstance(target, DTensor):
                full = full.as_subclass(Tensor)  # of bitsandbytes' own, in 4 bits
            full = full.to(device).contiguous()
            if isinstance(target, DTensor):
                # Collective: rank zero scatters, the others receive.
                parts = distribute_tensor(full, target.device_mesh, target.placements)
                target.to_local().copy_(parts.to_local())
            elif not _agrees(target):
                dist.broadcast(full, src=0)
                target.copy_(full)


def _agrees(tensor: Tensor) -> bool:
    """Whether it is quantised and whole, so that :func:`whole_on_rank_zero` has found it the same on every rank."""
    return isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor) and is_opaque(tensor)


def _make_room_(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Memory for all that rank zero sends; its shards at ``home``. What it does not send is kept."""
    # to_empty would wipe the numbers of quantised weights, which are not sent.
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
    # Buffers are no part of FSDP2's offload: they are used on the device.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _build_(model: nn.Module) -> str | None:
    """Weights for the layers that are on the meta device, on the host; or why there can be none."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places.setdefault(parameter, []).append((module, key))
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        lost = [key for key in module._non_persistent_buffers_set if getattr(module, key).is_meta]
        reset: Any = getattr(module, "reset_parameters", None)
        if lost or not callable(reset):
            return explain(
                f"layer '{name}' ({type(module).__name__}) is on the meta device",
                f"the values of its buffer '{lost[0]}' are gone" if lost else "it does not say how to make its weights",
                "Build it on rank zero outside of init_module, or give it a reset_parameters()",
            )
        module.to_empty(device="cpu", recurse=False)
        reset()
    for (first, name), *others in places.values():  # what was tied is now many
        for module, key in others:
            module._parameters[key] = first._parameters[name]
    return None


def _description(model: nn.Module) -> tuple[list[Any], dict[str, list[float]]]:
    """What all ranks must have in common: names, shapes and dtypes, and the numbers in quantised layers."""
    digests = {}
    for name, layer in model.named_modules():
        if any(is_opaque(p) for p in layer.parameters(recurse=False)):
            digests[name] = _digest(layer)
    tensors = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in _tensors(model).items()]
    return tensors, digests


def _digest(layer: nn.Module) -> list[float]:
    # Two sums for each tensor instead of all its numbers: this goes to every rank.
    tensors = [t.double() for t in layer.state_dict().values() if isinstance(t, Tensor) and not t.is_meta]
    return [float(total) for t in tensors for total in (t.sum(), t.square().sum())]


def _difference(mine: Any, first: Any, rank: int) -> str | None:
    if mine[0] != first[0]:
        names = sorted({entry[0] for entry in {*mine[0]} ^ {*first[0]}}) or ["their order"]
        why = "shards of different models do not fit together"
        way_out = "Build the same layers, in the same order, on every rank"
        return explain(f"rank {rank} has built another model than rank 0: {', '.join(names[:4])}", why, way_out)
    for name, digest in first[1].items():
        if mine[1][name] != digest:
            return explain(
                f"rank {rank} has quantised other weights than rank 0 in '{name}'",
                "their constants stay whole on every rank, so all of it must agree from the start",
                "Load the same pretrained weights on every rank, or call seed_everything() before the model is built",
            )
    return None
