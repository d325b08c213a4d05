"""Groups of parameters that FSDP2 gathers and reduces together, in bytes: the blocks, and the root."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.optim.named.state_bytes import Shape, state_bytes
from lightning_fasttrain.strategy.choose._model_sizes import Held, ceil_div
from lightning_fasttrain.strategy.choose.model_states import ModelStates
from lightning_fasttrain.strategy.fsdp2.packed_weights import whole_parameters
from lightning_fasttrain.strategy.fsdp2.shard_blocks import own_groups, precision_policy


@dataclass(frozen=True)
class ShardedGroup:
    """Sizes of a group of parameters that are gathered and freed together.

    Args:
        shard: bytes of one rank's shard.
        trained_shard: bytes of the trained parameters in that shard.
        gathered: bytes of the gathered parameters, padding included, in the dtype they compute in.
        reduced: bytes of the gradients, padding included, in the dtype they are reduced in.
        gathers: number of times that the group is gathered in a forward with its backward.
    """

    shard: int
    trained_shard: int
    gathered: int
    reduced: int
    gathers: int


def sharded_groups(held: Held, precision: str) -> list[ShardedGroup]:
    """Return the sharded groups of ``held.net``, the root last."""
    policy = precision_policy(precision)
    whole = whole_parameters(held.net, policy)
    inside: set[nn.Parameter] = set()
    groups = []
    for block in own_groups(held.net).values():
        parameters = [p for p in block.parameters() if p not in whole]
        inside.update(parameters)
        # A block is gathered in forward, and again in backward.
        groups.append(_group(held, policy, parameters, gathers=2))
    rest = [p for p in held.parameters if p not in whole and p not in inside]
    # The root stays gathered until its backward is done.
    return [*groups, _group(held, policy, rest, gathers=1)]


def _group(held: Held, policy: MixedPrecisionPolicy, parameters: Sequence[nn.Parameter], gathers: int) -> ShardedGroup:
    assert policy.reduce_dtype is not None
    shard = trained = gathered = reduced = 0
    for parameter in parameters:
        part, size = math.prod(_cut(parameter.shape, held.ranks)), held.itemsize(parameter)
        shard += part * size
        # FSDP2 casts floating-point parameters alone.
        used = size
        if policy.param_dtype is not None and parameter.is_floating_point():
            used = policy.param_dtype.itemsize
        gathered += part * held.ranks * used
        if parameter.requires_grad:
            trained += part * size
            reduced += part * held.ranks * policy.reduce_dtype.itemsize
    return ShardedGroup(shard, trained, gathered, reduced, gathers)


def _cut(shape: Sequence[int], ranks: int) -> Shape:
    """Return the shape of the first rank's shard of a parameter, which is sharded along its first dimension."""
    first, *others = shape or (1,)
    return (ceil_div(first, ranks), *others)


def fsdp2_states(
    held: Held, groups: Sequence[ShardedGroup], precision: str, *, micro_batches: int = 1, offload: bool = False
) -> ModelStates:
    """Predict the model states under FSDP2, with blocks that are resharded after their forward.

    "buffers" is an estimate: the gathered root, two gathered blocks (the one being prefetched counts twice), and the
    gradients of one block, unsharded and packed. With several micro-batches, unsharded gradients accumulate until
    the one reduction.
    """
    *blocks, root = groups
    widest = max((block.gathered for block in blocks), default=0)
    # In a model without blocks, those of the root.
    gradients = max((block.reduced for block in blocks), default=root.reduced)
    whole = bytes_of(whole_parameters(held.net, precision_policy(precision)))
    shards = trained = state = waiting = 0
    for sharded in groups:
        shards += sharded.shard
        trained += sharded.trained_shard
        if micro_batches > 1:
            waiting += sharded.reduced
    for group in held.groups:
        shapes = [_cut(shape, held.ranks) for shape in group.shapes]
        state += state_bytes(held.optimizer, group, shapes, held.dtype_of(group))
    parameters, buffers = whole + held.extras, root.gathered + 3 * widest + 2 * gradients
    if offload:
        return ModelStates("fsdp2+offload", parameters, waiting, 0, buffers, host=shards + trained + state)
    # A gradient's shard is as large as its parameter's shard.
    return ModelStates("fsdp2", parameters + shards, waiting + trained, state, buffers)


def ddp_states(held: Held) -> ModelStates:
    """Predict the model states under DDP; "buffers" are its buckets, a second copy of all gradients."""
    gradients = held.trained * held.size
    state = sum(state_bytes(held.optimizer, group, group.shapes, held.dtype_of(group)) for group in held.groups)
    copies = gradients if held.ranks > 1 else 0
    return ModelStates("ddp", held.whole + held.extras, gradients, state, copies)
