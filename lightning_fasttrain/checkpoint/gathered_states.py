"""Gather per-process state so that one checkpoint can hold it: as tensors, never as pickled objects."""

import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fasttrain.core.distributed import rank_count, rank_here


def pack(state: object) -> Tensor:
    """Serialize tensors and plain values to a uint8 tensor.

    Example:
        >>> unpack(pack({"n": 3, "of": torch.arange(2)}))
        {'n': 3, 'of': tensor([0, 1])}
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # torch warns of a buffer that cannot be written to, as bytes are.
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Deserialize what :func:`pack` returned, on the CPU. Only tensors and plain values are read."""
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def gather(mine: Tensor, device: torch.device, *, everywhere: bool = True) -> list[Tensor]:
    """Gather the bytes of all processes, in the order of ranks. All processes must call it.

    Args:
        mine: uint8 (n,), on the CPU; n may differ between ranks.
        device: this process's device, for backends that do not support CPU tensors.
        everywhere: whether all processes get them, whose number then counts twice, as for DeepSpeed, which writes them
            on every rank; otherwise only the first one does, and the result is empty on the others.
    """
    if rank_count() == 1:
        return [mine]
    device = _for_backend(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(rank_count())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device))
    # A collective takes tensors of the same size, so all are padded to the longest.
    counts = torch.cat(sizes).tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    everyone: list[Tensor] = []
    if everywhere or rank_here() == 0:
        everyone = [torch.empty_like(padded) for _ in counts]
    if everywhere:
        dist.all_gather(everyone, padded)
    else:
        dist.gather(padded, everyone or None, dst=0)
    # clone: otherwise a slice is saved together with its padding.
    return [data[:count].cpu().clone() for data, count in zip(everyone, counts, strict=False)]


def gather_values(mine: object, device: torch.device) -> list[Any]:
    """All-gather tensors and plain values of all processes, in the order of ranks. All processes must call it."""
    return list(map(unpack, gather(pack(mine), device)))


def gather_gradients(named: Iterable[tuple[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """Gather the gradients of all processes on rank 0's CPU; return [] elsewhere. All processes must call it.

    One parameter at a time, so that rank 0's device holds no more than one gradient per process.
    """
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if rank_count() == 1:
        return [{name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None}]
    device = _for_backend(device)
    # The ranks must call the same collectives, so they first agree on which parameters have a gradient somewhere.
    has = torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(has) for _ in range(rank_count())]
    dist.all_gather(everyone, has)
    held = torch.stack(everyone).cpu()
    gathered: list[dict[str, Tensor]] = [{} for _ in range(rank_count())]
    for i, (name, parameter) in enumerate(named):
        if not held[:, i].any():
            continue
        grad = parameter.grad
        # A rank without this gradient sends zeros, which rank 0 drops.
        if grad is None:
            grad = torch.zeros_like(parameter)
        grad = grad.detach().to(device).contiguous()
        parts = None
        if rank_here() == 0:
            parts = [torch.empty_like(grad) for _ in gathered]
        dist.gather(grad, parts, dst=0)
        for rank, part in enumerate(parts or []):
            if held[rank, i]:
                gathered[rank][name] = part.cpu().clone()
    if rank_here() != 0:
        return []
    return gathered


def _for_backend(device: torch.device) -> torch.device:
    # gloo gathers CPU tensors; "cpu:gloo,cuda:nccl" includes gloo too.
    if "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return device
