"""Replace the states of a traced step by those that one rank of many holds, by the formulas of its strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.predict.allocation_trace import Allocation

NOTE = (
    "Parameters, gradients, optimizer state and buffers of the rank are from the strategy's formulas; activations and "
    "temporaries are traced without sharding."
)


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
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    step_buffers: int
    step_share: float
    gathers: bool


@runtime_checkable
class KnowsRankStates(Protocol):
    """A strategy whose states on a rank are known by formulas."""

    def predict_rank_states(self, model: nn.Module, optimizer: Optimizer, world: int, precision: str) -> RankStates:
        """Return the states on the rank that holds most, of ``world``."""
        ...


def with_states_of_rank(allocations: Sequence[Allocation], states: RankStates, since: int) -> list[Allocation]:
    """Return the allocations of a step with the states of a rank.

    Args:
        allocations: those of two traced steps without sharding, whose gradients are freed after each step.
        states: bytes on the rank.
        since: the time at which the second step began.
    """
    counted = [allocation for allocation in allocations if allocation.died > since]
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
