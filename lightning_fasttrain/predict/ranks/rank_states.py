"""Replace the states of a traced step by those that one rank of many holds, by the formulas of its strategy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.predict.allocation_trace import Allocation

NOTE = (
    "Parameters, gradients, optimizer state and buffers of the rank are from the strategy's formulas; activations and "
    "temporaries are traced without sharding."
)


class RankStates(Protocol):
    """Bytes of a model's states on one rank, as in :class:`~lightning_fasttrain.strategy.ModelStates`."""

    @property
    def stage(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def optimizer(self) -> int: ...
    @property
    def buffers(self) -> int: ...


@runtime_checkable
class KnowsRankStates(Protocol):
    """A strategy whose states on a rank are known by formulas."""

    def predict_rank_states(self, model: nn.Module, optimizer: Optimizer, world: int, precision: str) -> RankStates:
        """Return the states on the rank that holds most, of ``world``."""


def with_states_of_rank(allocations: Sequence[Allocation], states: RankStates, since: int) -> list[Allocation]:
    """Return the allocations of a step with the states of a rank.

    Args:
        allocations: those of two traced steps without sharding, whose gradients are freed after each step.
        states: bytes on the rank.
        since: the time at which the second step began.
    """
    sharded = states.stage.startswith("3")
    born = [a.born for a in allocations if a.phase == "backward" and a.born > since]
    start_of_backward = born[0] if born else since
    # The gradients of stage 3 are slices of one buffer, which is never freed.
    wanted = {"parameters": states.parameters, "optimizer state": states.optimizer}
    wanted["gradients"] = 0 if sharded else states.gradients
    total = dict.fromkeys(wanted, 0)
    counted = [a for a in allocations if a.died > since]
    for allocation in counted:
        if allocation.category in total:
            total[allocation.category] += allocation.nbytes
    held = []
    for allocation in counted:
        category = allocation.category
        if category in wanted:
            share = allocation.nbytes * wanted[category] // max(total[category], 1)
            allocation = replace(allocation, nbytes=share)
        held.append(allocation)
    # Gathered parameters are there in the forward too; buckets are filled in the backward.
    buffers = Allocation(states.buffers, "", "buckets and gathered parameters", "backward", start_of_backward, 0)
    buffers.known = "temporaries"
    held.append(replace(buffers, born=since) if sharded else buffers)
    if sharded:
        held.append(replace(buffers, nbytes=states.gradients, op="", born=since, known="gradients"))
    return held
