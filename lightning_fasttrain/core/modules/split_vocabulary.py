"""A head whose vocabulary is split over a group of ranks, and reductions over the classes of all of them."""

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward


@dataclass(frozen=True)
class VocabularyShard:
    """The classes of a head whose logits one rank computes.

    Args:
        group: the ranks that share the head.
        start: the first class of this rank.
        end: the class after its last one.
        largest: the largest number of classes on a rank.
        classes: the number of all classes, V.
    """

    group: dist.ProcessGroup
    start: int
    end: int
    largest: int
    classes: int

    @classmethod
    def of(cls, weight: DTensor) -> "VocabularyShard":
        """Return this rank's classes of a weight (V, D) that is split by rows over a mesh of one dimension."""
        mesh, classes = weight.device_mesh, weight.shape[0]
        largest = -(-classes // mesh.size())  # as torch chunks
        start = min(mesh.get_local_rank() * largest, classes)
        return cls(mesh.get_group(), start, min(start + largest, classes), largest, classes)

    def take(self, values: Tensor) -> Tensor:
        """Return this rank's share of values per class, (V, ...)."""
        return values[self.start : self.end]

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are among this rank's classes, and their places; 0 for the others."""
        mine = (targets >= self.start) & (targets < self.end)
        return mine, torch.where(mine, targets - self.start, 0)

    def logsumexp(self, mine: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials of all classes, from that of this rank's."""
        largest = self._reduce(mine, "max")
        return largest + self._reduce((mine - largest).exp(), "sum").log()

    def sum(self, *mine: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of tensors of one shape over the group, in one reduction."""
        return self._reduce(torch.stack(mine), "sum").unbind()

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(values.contiguous(), how, self.group))


def is_split_by_rows(weight: object) -> TypeGuard[DTensor]:
    """Return whether a weight is a DTensor whose rows are split over a mesh of one dimension."""
    return isinstance(weight, DTensor) and weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0)


def on_all_ranks(values: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks of a mesh have as a DTensor, whose gradient is summed over them."""
    if isinstance(values, DTensor):
        return values
    return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


def share_of_gradient(values: DTensor) -> Tensor:
    """Return the plain values of a replicated tensor; each rank will have a part of its gradient."""
    return values.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SplitHead(WrappedForward):
    """Computes the logits of all classes where the rows of a linear layer are split over a group of ranks.

    Its weight and bias are DTensors. Each rank computes the logits of its own classes, and they are gathered. A loss
    that uses the split weight itself, as :func:`~lightning_fasttrain.linear_cross_entropy`, gathers none.
    """

    module: nn.Linear

    def __call__(self, input: Tensor, *args: object) -> Tensor:
        weight: Any = self.module.weight
        logits: Any = F.linear(on_all_ranks(input, weight.device_mesh), weight, self.module.bias)
        return logits.redistribute(placements=[Replicate()]).to_local()
