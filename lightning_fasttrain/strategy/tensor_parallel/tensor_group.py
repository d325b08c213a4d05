"""Agreement inside a tensor group, whose ranks must see the same batches and draw the same random numbers."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.rng import random_state, set_random_state


def share_random_state_(group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the random state of its first rank, so that they drop the same activations.

    Args:
        group: a tensor group.
    """
    if group.size() == 1:
        return
    states = [random_state()]
    dist.broadcast_object_list(states, group=group, group_src=0)
    set_random_state(states[0])


def refuse_other_batches(batch: object, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse batches that differ in a tensor group; a collective.

    Args:
        batch: this rank's batch, of any structure; only its tensors are compared, by number, size and sum.
        group: a tensor group.
        device: the device on which the group communicates.

    Raises:
        ValueError: on all ranks of the group, its ranks have different batches.
    """
    if group.size() == 1:
        return
    tensors = [leaf.detach() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    mine = torch.zeros(2, dtype=torch.float64, device=device)
    for place, tensor in enumerate(tensors, start=1):
        mine[0] += place * tensor.numel()
        # NaN in both batches is no difference.
        mine[1] += tensor.double().sum().nan_to_num()
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    if not torch.equal(largest, smallest):
        why = "the ranks of a group compute parts of the layers or of the tokens for the same batch"
        way_out = "Let the Trainer or Fabric set the sampler, or use strategy.distributed_sampler_kwargs for your own"
        raise ValueError(explain("the ranks of a tensor or context group have different batches", why, way_out))
