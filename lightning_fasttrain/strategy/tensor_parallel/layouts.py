"""Layouts of parameters over the ranks of a tensor group, and the plain tensors that these ranks compute with."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Interval = tuple[int, int]  # [start, end)


@dataclass(frozen=True)
class Layout:
    """Layout of one parameter over a tensor group.

    Args:
        placement: how the ranks of the group store it.
        summed: each rank has a part of the gradient, and the parts are summed. Otherwise, the gradient of a replicated
            parameter is identical on all ranks.
        parts: the number of equal parts, as of a fused projection for queries, keys and values, of which a rank
            computes with its share of the rows of a replicated parameter; 0 for all rows.
        first_only: only the first rank computes with its values, the others with zeros, such as for a bias whose
            layer's outputs are summed over the group.
    """

    placement: Placement
    summed: bool = False
    parts: int = 0
    first_only: bool = False

    def distribute(self, full: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        """Return the parameter as a DTensor over the group, from the values of this rank, without communication."""
        rank, size = mesh.get_local_rank(), mesh.size()
        values = full.detach()
        held = split_intervals(values.shape, self.placement, rank, size)
        return nn.Parameter(_distribute(values, held, mesh, [self.placement]), requires_grad=full.requires_grad)

    def local(self, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """Return the plain tensor that this rank computes with; its gradient reaches ``parameter``."""
        gradient = Partial() if self.summed else self.placement
        # Parameters are set in forward, in backward for recomputation, and where gradients are disabled.
        with torch.enable_grad():
            values = parameter.to_local(grad_placements=[gradient])
            rank, size = mesh.get_local_rank(), mesh.size()
            if self.parts:
                values = _take(values, split_intervals(values.shape, shard_of(0, self.parts), rank, size))
            if self.first_only:
                values = values * float(rank == 0)
        return values


REPLICATED = Layout(Replicate())
SUMMED = Layout(Replicate(), summed=True)


def shard_of(axis: int, parts: int = 1) -> Placement:
    """Return the placement that gives each rank its share of each of ``parts`` equal parts along ``axis``."""
    return Shard(axis) if parts == 1 else _StridedShard(axis, split_factor=parts)


def is_striped(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a rank's shard of a DTensor consists of several ranges of one axis, as of a fused projection."""
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], _StridedShard)


def split_intervals(shape: torch.Size, placement: Placement, rank: int, size: int) -> list[list[Interval]]:
    """Return, for each axis of a tensor, the ranges of indices that one of ``size`` ranks holds."""
    ranges: list[list[Interval]] = [[(0, length)] for length in shape]
    if not isinstance(placement, Shard | _StridedShard):
        return ranges
    parts = getattr(placement, "split_factor", 1)
    length = shape[placement.dim] // parts
    share = -(-length // size)  # as torch chunks
    held = []
    for part in range(parts):
        start, end = min(rank * share, length), min((rank + 1) * share, length)
        held.append((part * length + start, part * length + end))
    ranges[placement.dim] = held
    return ranges


def ranges_of(tensor: DTensor) -> list[list[Interval]]:
    """Return, for each axis, the ranges of indices that this rank holds of a tensor sharded over data and tensor ranks.

    The tensor group splits an axis first, and data ranks split another one.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    ranges: list[list[Interval]] = [[(0, length)] for length in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            split = split_intervals(tensor.shape, placement, coordinate[axis], mesh.size(axis))
            ranges[placement.dim] = split[placement.dim]
    return ranges


def take_shard(full: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of an unsharded tensor that all ranks have, in the layout of ``like``."""
    return _distribute(full, ranges_of(like), like.device_mesh, like.placements)


def _distribute(full: Tensor, held: list[list[Interval]], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    # In torch 2.13 distribute_tensor does the same, also for several ranges of an axis; with torch 2.11 it is untested.
    known: dict[str, Any] = {"run_check": False, "shape": full.shape, "stride": full.contiguous().stride()}
    return DTensor.from_local(_take(full, held).contiguous(), mesh, placements, **known)


def shard_like(full: Tensor, like: object) -> Any:
    """Return an unsharded tensor that all ranks have in the layout of ``like``, without communication."""
    if not isinstance(like, DTensor):
        return full
    on_mesh = full.to(like.device_mesh.device_type)
    if is_striped(like):
        return take_shard(on_mesh, like).to(like.device)
    # src_data_rank=None: each rank takes its shard.
    return distribute_tensor(on_mesh, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def _take(full: Tensor, ranges: list[list[Interval]]) -> Tensor:
    for axis, held in enumerate(ranges):
        slices = [full.narrow(axis, start, end - start) for start, end in held]
        full = slices[0] if len(slices) == 1 else torch.cat(slices, axis)
    return full


def in_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors for ``torch.distributed.checkpoint``, the striped ones as several chunks in the same memory."""
    chunked = dict(tensors)
    for name, tensor in tensors.items():
        if is_striped(tensor):
            chunked[name] = StripedShard.of(tensor)
    return chunked


# Why not save the DTensor itself? It offers its shard as one chunk at one offset, but a rank's share of queries, keys
# and values is three ranges, so that the chunks of ranks overlap, as in the fused projections of transformers' GPT-2:
# test_conv1d_of_gpt2_and_positions_of_deberta_train_as_in_one_process.
class StripedShard(Tensor):
    """A rank's striped shard for ``torch.distributed.checkpoint``, which stores it as one chunk per range.

    Source:
        The protocol that ``DTensor`` implements for its single chunk.
    """

    _full: torch.Size
    _chunks: dict[tuple[int, ...], Tensor]

    @classmethod
    def of(cls, tensor: DTensor) -> "StripedShard":
        """Return the shard of a DTensor, in the same memory."""
        local = tensor.detach().to_local()
        shard = local.as_subclass(cls)
        shard._full, shard._chunks = tensor.shape, {}
        ranges = ranges_of(tensor)
        # At most one axis has several ranges.
        for chosen in itertools.product(*ranges):
            chunk, offsets = local, []
            for axis, (start, end) in enumerate(chosen):
                before = sum(e - s for s, e in ranges[axis] if e <= start)
                chunk = chunk.narrow(axis, before, end - start)
                offsets.append(start)
            shard._chunks[tuple(offsets)] = chunk
        return shard

    def size(self, *args: Any) -> Any:  # the planner compares it with the stored size
        return self._full if not args else self._full[args[0]]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        items = []
        for chunk in self.__create_chunk_list__():
            index, properties = MetadataIndex(name, chunk.offsets), TensorProperties(dtype=self.dtype)
            data = TensorWriteData(chunk=chunk, properties=properties, size=self._full)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for offsets, chunk in self._chunks.items():
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._chunks[tuple(index.offset)]
