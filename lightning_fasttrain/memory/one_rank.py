"""The rank that a prediction is for: how its strategy changes the model, and what it holds of a traced step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from lightning_fasttrain.core.host.lightning import has_buckets_beside_gradients
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import bytes_of, quantized_tensors, trained_parameters
from lightning_fasttrain.memory.allocation_trace import FOR_EVER, Allocation
from lightning_fasttrain.technique.declarations import PredictedStep

STEP = "_predicted_step"  # method of a model, while it is sharded for a prediction


@runtime_checkable
class ShardsFakeModel(Protocol):
    """A strategy that can shard a model in a prediction; the strategy itself is not changed."""

    def shard_predicted_(self, model: nn.Module, world: int, precision: str, step: str) -> None:
        """Shard ``model``, whose parameters are on the meta device, and gather the root in its method ``step``.

        ``torch.distributed`` is initialized, with collectives that move nothing.
        """

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of all micro-batches but the last."""
        ...

    @property
    def sharding_on_device(self) -> object:
        """The sharding without its offload; strategies with equal ones share a trace."""
        ...

    @property
    def offloads(self) -> bool:
        """Whether shards, their gradients and the optimizer's state are in host memory."""
        ...


@contextmanager
def sharded(
    model: nn.Module,
    strategy: ShardsFakeModel,
    world: int,
    rank: int,
    forward: Callable[[Any], object],
    planned: PredictedStep,
    mode: FakeMode,
) -> Iterator[Callable[[Any], Any]]:
    """Shard ``model`` in place as ``rank`` of ``world`` does, inside of ``mode``.

    Args:
        model: the model, of tensors of ``mode``.
        strategy: the strategy.
        world, rank: number of ranks, and the one to predict.
        forward: batch → loss.
        planned: the step; its precision is used, and how it accumulates is set.
        mode: the fake mode.

    Yields:
        ``forward``, run as the strategy runs a step.

    Raises:
        ValueError: a parameter is quantised, or this process has joined a process group.
    """
    if next(quantized_tensors(model), None) is not None:
        why = "a packed weight of a fake tensor cannot be cut"
        way_out = "Leave out strategy=, or predict the unquantised model"
        raise ValueError(explain("a prediction of quantised weights on several ranks", why, way_out))
    with fake_ranks(world, rank):
        with unset_fake_temporarily():
            _move_to_meta_(model)
            setattr(model, STEP, forward)
            strategy.shard_predicted_(model, world, planned.precision, STEP)
        # As to_empty() does for a model on the meta device: FSDP2 takes its shards from here.
        model._apply(partial(_leave_meta, mode))
        planned.without_reduction = partial(strategy.without_reduction, model)
        yield getattr(model, STEP)


def _move_to_meta_(model: nn.Module) -> None:
    """Replace the parameters by some on the meta device, on which cutting them into a thousand shards is quick."""
    moved: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in moved:
                like = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
                moved[parameter] = nn.Parameter(like, parameter.requires_grad)
            module._parameters[name] = moved[parameter]


def _leave_meta(mode: FakeMode, tensor: Tensor) -> Tensor:
    """Return a tensor of ``mode`` like a parameter on the meta device, or a shard like one there."""
    if isinstance(tensor, DTensor):
        return DTensor(_leave_meta(mode, tensor._local_tensor), tensor._spec, requires_grad=False)  # type: ignore[call-arg]
    if isinstance(tensor, FakeTensor):
        return tensor  # a buffer
    with no_dispatch():
        return mode.wrap(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"))


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Context in which this process is ``rank`` of ``world``; collectives return at once, and move nothing.

    Args:
        world: number of ranks.
        rank: rank of this process.

    Raises:
        ValueError: ``rank`` is not below ``world``, or this process has joined a process group already.

    Example:
        >>> with fake_ranks(1024, rank=3):
        ...     dist.get_world_size(), dist.get_rank()
        (1024, 3)
        >>> dist.is_initialized()
        False

    Source:
        ``torch.testing._internal.distributed.fake_pg``.
    """
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if rank >= world:
        why = f"ranks are counted from 0, so the last one is {world - 1}"
        raise ValueError(explain(f"rank={rank} of world={world}", why, "Use a rank below world"))
    if dist.is_initialized():
        why = f"this process is one of {dist.get_world_size()} ranks already, and torch has one default process group"
        way_out = "Predict in a process of its own, such as with `fasttrain memory`"
        raise ValueError(explain("a prediction for one rank of many", why, way_out))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


_STREAMS = "Gathers and computation are assumed to share memory, as on one CUDA stream."
_FORMULAS = (
    "Parameters, gradients, optimizer state and buffers of the rank are from the strategy's formulas; activations and "
    "temporaries are traced without sharding."
)
# What FSDP2 moves to host memory, with the temporaries of the step that runs there.
_OFFLOADED = ("gradients", "optimizer state")


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that the ranks of a strategy exchange in a step, as sizes of unsharded tensors.

    Args:
        bucket: gradients that are reduced at once.
        each_micro_batch: whether each micro-batch reduces its gradients, not the last one alone.
        scatters: whether gradients are reduced to shards, not to all ranks.
        fetched: parameters that are gathered in each forward with its backward.
        prefetch: parameters that are gathered at once.
        updated: parameters that are gathered after the update.
        modules: number of modules whose hooks gather parameters, in each forward with its backward.
        updates: number of gathers after the update, one after the other.
    """

    bucket: int
    each_micro_batch: bool = False
    scatters: bool = False
    fetched: int = 0
    prefetch: int = 1
    updated: int = 0
    modules: int = 0
    updates: int = 1


@dataclass(frozen=True)
class RankStates:
    """Bytes of a model's states on one rank.

    Args:
        parameters: bytes of the parameters, as kept between uses.
        gradients: bytes of the gradients that are kept until the optimizer step.
        optimizer: bytes of the optimizer state and of master weights.
        buffers: bytes of buckets in the backward, and of gathered parameters.
        step_buffers: bytes of buffers in the optimizer step.
        step_share: share of the optimizer step that runs on this rank's device; its temporaries are divided by it.
        gathers: whether parameters are sharded, so that buffers exist in the forward too, and gradients between steps.
        host: bytes in host memory.
        nvme: bytes on disk.
        traffic: what the ranks exchange.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    step_buffers: int
    step_share: float
    gathers: bool
    host: int = 0
    nvme: int = 0
    traffic: RankTraffic | None = None


@runtime_checkable
class KnowsRankStates(Protocol):
    """A strategy whose states on a rank are known by formulas, because its engine cannot run on fake tensors."""

    def predict_rank_states(self, model: nn.Module, optimizer: Optimizer, world: int, precision: str) -> RankStates:
        """Return the states on the rank that holds most, of ``world``."""
        ...


class OneRank:
    """One of ``world`` ranks under a strategy; without a strategy, the only one.

    Args:
        strategy: None, ``"ddp"``, Lightning's ``DDPStrategy``, an :class:`~lightning_fasttrain.FSDP2Strategy` or a
            :class:`~lightning_fasttrain.ZeROStrategy`.
        world: number of ranks.
        rank: the rank.

    Attributes:
        states: bytes of states that the strategy's formulas give; None where they are traced.
        buckets: bytes of DDP's buckets.

    Raises:
        TypeError: the strategy cannot be predicted.
        ValueError: ``rank`` is not below ``world``, or there are several ranks without a strategy.
    """

    def __init__(self, strategy: object, world: int, rank: int) -> None:
        if rank >= world:
            why = f"ranks are counted from 0, so the last one is {world - 1}"
            raise ValueError(explain(f"rank={rank} of world={world}", why, "Use a rank below world"))
        if strategy is None and world > 1:
            why = "the strategy decides what each rank holds"
            raise ValueError(explain(f"world={world} without strategy=", why, "Pass strategy=FSDP2Strategy()"))
        self.strategy = DDPStrategy() if strategy == "ddp" else strategy
        self.world, self.rank = world, rank
        known = self.strategy is None or isinstance(self.strategy, DDPStrategy | ShardsFakeModel | KnowsRankStates)
        if not known:
            why = "its ranks cannot be predicted"
            way_out = "Pass 'ddp', an FSDP2Strategy or a ZeROStrategy"
            raise TypeError(explain(f"strategy={strategy!r}", why, way_out))
        self.states: RankStates | None = None
        self.buckets = 0
        self._shards: set[str] = set()

    def precision(self, precision: str) -> str:
        """Return the precision in which this rank computes: DeepSpeed casts the model under "bf16-mixed" too."""
        if isinstance(self.strategy, KnowsRankStates) and precision != "32-true":
            return "bf16-true"
        return precision

    def key(self, precision: str) -> tuple[object, ...]:
        """Return what decides the traced step; ranks with equal keys share a trace."""
        sharding = None
        if isinstance(self.strategy, ShardsFakeModel):
            sharding = self.strategy.sharding_on_device
        return sharding, self.precision(precision)

    def notes(self, on_cuda: bool) -> list[str]:
        """Return what the prediction of this rank assumes."""
        if isinstance(self.strategy, KnowsRankStates):
            return [_FORMULAS]
        if isinstance(self.strategy, ShardsFakeModel) and on_cuda:
            return [_STREAMS]
        return []

    @contextmanager
    def shard(
        self, model: nn.Module, forward: Callable[[Any], object], planned: PredictedStep, mode: FakeMode
    ) -> Iterator[Callable[[Any], Any]]:
        """Shard ``model`` in place, if the strategy does so; yield ``forward`` as the strategy runs it."""
        if not isinstance(self.strategy, ShardsFakeModel):
            yield forward
            return
        with sharded(model, self.strategy, self.world, self.rank, forward, planned, mode) as sharded_forward:
            yield sharded_forward

    def count_states(self, model: nn.Module, optimizer: Optimizer, precision: str) -> None:
        """Note what the trace does not show: DDP's buckets, states by formula, and which parameters are shards."""
        if isinstance(self.strategy, KnowsRankStates):
            self.states = self.strategy.predict_rank_states(model, optimizer, self.world, precision)
        elif isinstance(self.strategy, DDPStrategy):
            if self.world > 1 and has_buckets_beside_gradients(self.strategy):
                self.buckets = bytes_of(trained_parameters(model))
        elif isinstance(self.strategy, ShardsFakeModel):
            for name, parameter in model.named_parameters():
                if isinstance(parameter, DTensor):
                    self._shards.add(name)

    def allocations(self, traced: Sequence[Allocation], since: int) -> list[Allocation]:
        """Return the allocations of a traced step as they are on the device of this rank."""
        if self.states is not None:
            return _with_states(traced, self.states, since)
        kept = list(traced)
        if isinstance(self.strategy, ShardsFakeModel) and self.strategy.offloads:
            kept = [allocation for allocation in traced if not self._is_offloaded(allocation, since)]
        if self.buckets:
            kept.append(_hold(self.buckets, "temporaries", "buckets of DDP", since, FOR_EVER))
        return kept

    def host_allocations(self, traced: Sequence[Allocation], since: int) -> list[Allocation]:
        """Return the traced allocations that are in host memory."""
        if isinstance(self.strategy, ShardsFakeModel) and self.strategy.offloads:
            return [allocation for allocation in traced if self._is_offloaded(allocation, since)]
        if self.states is not None and self.states.host:
            return [_hold(self.states.host, "parameters", "offloaded states", since, FOR_EVER)]
        return []

    @property
    def nvme_bytes(self) -> int:
        """Bytes on disk."""
        return 0 if self.states is None else self.states.nvme

    def _is_offloaded(self, allocation: Allocation, since: int) -> bool:
        if allocation.category in _OFFLOADED or allocation.phase == "optimizer step":
            return True
        existed = allocation.born <= since and allocation.died == FOR_EVER
        return allocation.category == "parameters" and existed and allocation.module in self._shards


def _with_states(allocations: Sequence[Allocation], states: RankStates, since: int) -> list[Allocation]:
    """Return the allocations of a step, traced without sharding, with the states of a rank.

    Args:
        allocations: those of two traced steps.
        states: bytes on the rank.
        since: the time at which the second step began.
    """
    counted = []
    for allocation in allocations:
        # DeepSpeed frees gradients in its step, so that those of the step before do not exist in the forward.
        released = allocation.category == "gradients" and allocation.born <= since
        if allocation.died > since and not released:
            counted.append(allocation)
    wanted = {
        "parameters": states.parameters,
        "optimizer state": states.optimizer,
        # Those of sharded parameters are slices of one buffer, which is never freed.
        "gradients": 0 if states.gathers else states.gradients,
    }
    total = dict.fromkeys(wanted, 0)
    for allocation in counted:
        if allocation.category in total:
            total[allocation.category] += allocation.nbytes
    held = []
    for allocation in counted:
        category, nbytes = allocation.category, allocation.nbytes
        if category in wanted:
            nbytes = nbytes * wanted[category] // max(total[category], 1)
        elif allocation.phase == "optimizer step":
            nbytes = int(nbytes * states.step_share)
        held.append(replace(allocation, nbytes=nbytes))
    end = max((a.born for a in counted), default=since)
    backward = _start_of("backward", counted, since, end)
    step = _start_of("optimizer step", counted, since, end)
    if states.gathers:
        held.append(_hold(states.gradients, "gradients", "", since, end))
        backward = since
    held.append(_hold(states.buffers, "temporaries", "buckets and gathered parameters", backward, step - 1))
    held.append(_hold(states.step_buffers, "temporaries", "buffers of the optimizer step", step, end + 1))
    return held


def _start_of(phase: str, allocations: Sequence[Allocation], since: int, end: int) -> int:
    return min((a.born for a in allocations if a.phase == phase and a.born > since), default=end)


def _hold(nbytes: int, category: str, op: str, born: int, died: int) -> Allocation:
    phase = "optimizer step" if "step" in op else "backward"
    return Allocation(nbytes, "", op, phase, born, 0, died, category)
