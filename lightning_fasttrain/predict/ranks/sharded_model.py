"""Shard a model of fake tensors by the code of the strategy that will shard the real one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.predict.ranks.fake_ranks import fake_ranks
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
