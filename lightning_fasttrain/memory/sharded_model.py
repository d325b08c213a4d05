"""Shard a model of fake tensors by the code of the strategy that will shard the real one, as one rank of many."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors
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
    mode: FakeTensorMode,
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
        # As for a model that was built on the meta device: FSDP2 takes its shards from here.
        model.to_empty(device="cpu")
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
