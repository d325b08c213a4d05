"""Prediction of the bytes that each rank moves in one optimizer step: to other ranks, to its host, to disk."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.strategy.fsdp2.shard_blocks import find_sharding_groups, precision_policy, unsharded_parameters
from lightning_fasttrain.strategy.zero.zero_states import (
    MASTER,
    STAGES,
    Held,
    MakeOptimizer,
    ZeROSizes,
    ceil_div,
    held_by,
)

FSDP2 = ("fsdp2", "fsdp2+offload")
STRATEGIES = ("ddp", *FSDP2, *(f"zero-{stage}" for stage in STAGES))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in one optimizer step.

    Args:
        strategy: one of ``"ddp"``, ``"fsdp2"``, ``"fsdp2+offload"``, ``"zero-0"`` … ``"zero-3+nvme"``.
        ranks: bytes sent to other ranks; as many are received.
        host: bytes between the device and host memory, in both directions together.
        nvme: bytes between host memory and disk, in both directions together.
    """

    strategy: str
    ranks: int
    host: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        """Total bytes; a byte to the host counts like a byte to another rank."""
        return self.ranks + self.host + self.nvme


def all_reduce_bytes(nbytes: int, world_size: PositiveInt) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of ``nbytes`` over n ranks: 2(n−1)/n · ``nbytes``.

    Example:
        >>> all_reduce_bytes(800, 4)
        1200
    """
    return 2 * gather_bytes(nbytes, world_size)


def gather_bytes(nbytes: int, world_size: PositiveInt) -> int:
    """Return the bytes that each rank sends in an all-gather or reduce-scatter of ``nbytes``: (n−1)/n · ``nbytes``.

    Example:
        >>> gather_bytes(800, 4)
        600
    """
    return nbytes * (world_size - 1) // world_size


@check_arguments
def predict_traffic(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    world_size: PositiveInt,
    precision: str = "32-true",
    strategies: Sequence[str] = STRATEGIES,
    micro_batches: PositiveInt = 1,
    sizes: ZeROSizes | None = None,
) -> list[Traffic]:
    """Predict the bytes that each rank moves in one optimizer step, for each strategy.

    For gradients of G bytes and parameters of P bytes (frozen ones included), n ranks and m micro-batches per step:

    - DDP, and stage 0: one all-reduce of the gradients, 2(n−1)/n · G
    - FSDP2: each block is gathered in forward and in backward, parameters outside of blocks once; gradients are
      reduce-scattered once per step: (n−1)/n · (2m·P + G) or less
    - stage 1: one all-reduce of the gradients, then an all-gather of the parameters, (n−1)/n · (2G + P)
    - stage 2: likewise with m all-reduces. DeepSpeed reduces to all ranks, not only to the owner of a shard
      (``use_multi_rank_bucket_allreduce``), so stage 2 saves memory but not traffic
    - stage 3: parameters are gathered in forward, and again in backward unless they are kept (``ZeROSizes.reuse``): a
      model below half a billion parameters is gathered once; (n−1)/n · m · (2P + G), or m · (P + G)

    In bfloat16 DeepSpeed sends bfloat16; DDP under "bf16-mixed" sends float32, FSDP2 gathers bfloat16 and reduces in
    float32.

    Args:
        module: the model, or a function that builds it; nothing is allocated, and the model is not changed.
        optimizer: the optimizer in use, or a function of the parameters that makes it; by default that of
            ``configure_optimizers``. It decides which parameters train, and for disk the size of the optimizer state.
        world_size: number of ranks.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        strategies: the strategies to predict.
        micro_batches: forward and backward passes per optimizer step.
        sizes: DeepSpeed's bucket sizes.

    Returns:
        One :class:`Traffic` per strategy, in the order of ``strategies``.

    Raises:
        ValueError: a strategy or the precision is unknown, or a number is below one.

    Example:
        >>> import torch
        >>> net = nn.Linear(1000, 1000, bias=False)
        >>> adam = torch.optim.AdamW(net.parameters())
        >>> for traffic in predict_traffic(net, adam, world_size=4, strategies=("ddp", "zero-2")):
        ...     traffic.strategy, traffic.ranks
        ('ddp', 6000000)
        ('zero-2', 9000000)

    Source:
        Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", for the collectives.
        Compared with the bytes that two processes pass to collectives, and send over the network, with gloo. Traffic
        to the host and to disk was read from DeepSpeed's sources only.
    """
    for strategy in strategies:
        one_of("strategy", strategy, STRATEGIES)
    held = held_by(module, optimizer, world_size, precision)
    moved = Moved(held, held.as_torch_does(precision), precision, micro_batches, sizes or ZeROSizes())
    return list(map(moved.predict, strategies))


@dataclass(frozen=True)
class _Group:
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


def _find_groups(held: Held, precision: str) -> list[_Group]:
    """Return the sharded groups of ``held.net``, the root last."""
    policy = precision_policy(precision)
    whole = unsharded_parameters(held.net, policy)
    inside: set[nn.Parameter] = set()
    groups = []
    for block in find_sharding_groups(held.net).values():
        parameters = [p for p in block.parameters() if p not in whole]
        inside.update(parameters)
        # A block is gathered in forward, and again in backward.
        groups.append(_measure_group(held, policy, parameters, gathers=2))
    rest = [p for p in held.parameters if p not in whole and p not in inside]
    # The root stays gathered until its backward is done.
    return [*groups, _measure_group(held, policy, rest, gathers=1)]


def _measure_group(
    held: Held, policy: MixedPrecisionPolicy, parameters: Sequence[nn.Parameter], gathers: int
) -> _Group:
    assert policy.reduce_dtype is not None
    shard = trained = gathered = reduced = 0
    for parameter in parameters:
        first, *others = parameter.shape or (1,)
        # The first rank has the largest part of the rows.
        part, size = ceil_div(first, held.ranks) * math.prod(others), held.itemsize(parameter)
        shard += part * size
        # FSDP2 casts floating-point parameters alone.
        used = size
        if policy.param_dtype is not None and parameter.is_floating_point():
            used = policy.param_dtype.itemsize
        gathered += part * held.ranks * used
        if parameter.requires_grad:
            trained += part * size
            reduced += part * held.ranks * policy.reduce_dtype.itemsize
    return _Group(shard, trained, gathered, reduced, gathers)


@dataclass(frozen=True)
class Moved:
    """Traffic predictor for a model whose sizes are measured already.

    Args:
        deepspeed: sizes as DeepSpeed holds the model.
        own: sizes as DDP and FSDP2 hold the model.
        precision: Lightning's name of the precision.
        micro_batches: micro-batches per step.
        sizes: DeepSpeed's bucket sizes.
    """

    deepspeed: Held
    own: Held
    precision: str
    micro_batches: int
    sizes: ZeROSizes

    @cached_property
    def groups(self) -> list[_Group]:
        """Groups of parameters that FSDP2 gathers together."""
        return _find_groups(self.own, self.precision)

    def predict(self, strategy: str) -> Traffic:
        """Predict the bytes that one rank moves in a step under ``strategy``."""
        if strategy == "ddp":
            return _ddp(self.own)
        if strategy in FSDP2:
            return _fsdp2(self.groups, strategy, self.own.ranks, self.micro_batches)
        return _zero(self.deepspeed, strategy, self.micro_batches, self.sizes)


def _ddp(held: Held) -> Traffic:
    # Buffers are broadcast before each training forward.
    buffers = bytes_of(held.net.buffers())
    gradients = all_reduce_bytes(held.trained * held.size, held.ranks)
    return Traffic("ddp", gradients + gather_bytes(buffers, held.ranks))


def _fsdp2(groups: Sequence[_Group], strategy: str, ranks: int, micro_batches: int) -> Traffic:
    gathered = reduced = host = 0
    for group in groups:
        gathers = group.gathers * micro_batches
        gathered += gathers * group.gathered
        # Unsharded gradients accumulate until the last micro-batch, so they are reduced once.
        reduced += group.reduced
        if strategy == "fsdp2+offload":
            host += gathers * group.shard + group.trained_shard
    return Traffic(strategy, gather_bytes(gathered + reduced, ranks), host)


def _zero(held: Held, strategy: str, micro_batches: int, sizes: ZeROSizes) -> Traffic:
    stage = strategy.removeprefix("zero-")
    gradients, flat, shards = held.trained * held.size, sum(held.flat_shards()), sum(held.parameter_shards())
    summed = all_reduce_bytes(gradients, held.ranks)
    if stage == "0":
        return Traffic(strategy, summed)
    if stage in ("1", "2", "2+offload"):
        # Stage 2 reduces in each micro-batch, stage 1 once per accumulation window.
        times = 1 if stage == "1" else micro_batches
        between = times * summed + gather_bytes(flat * held.ranks * held.size, held.ranks)
        host = 0
        if stage == "2+offload":
            # Gradients are copied to the host in float32; those of further micro-batches are copied to the host, to
            # the device and to the host again in their own dtype.
            host = flat * (MASTER + held.size) + 2 * (micro_batches - 1) * held.owned_bytes()
        return Traffic(strategy, between, host)
    offloaded = stage != "3"
    staying, fetched = held.fetched_bytes(sizes)
    between = gather_bytes(staying + micro_batches * (fetched + shards * held.ranks * held.size), held.ranks)
    host = nvme = 0
    if offloaded:
        # Shards are copied from the host for every gather.
        host = (staying + micro_batches * fetched) // held.ranks
        host += shards * (MASTER + (2 * micro_batches - 1) * held.size)
    if stage == "3+nvme":
        updated = shards * 2 * MASTER + held.state(held.parameter_shards())
        nvme = 2 * updated + shards * held.size + (staying + micro_batches * fetched) // held.ranks
    return Traffic(strategy, between, host, nvme)
