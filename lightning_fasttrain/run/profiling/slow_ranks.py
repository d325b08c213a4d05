"""Find the process that the others wait for, how long they wait, and in which phase of the step."""

import socket
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import nn

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.run.checkpoint._gathered_states import gather, pack, unpack

UNTIL_BACKWARD = ("data_wait", "transfer", "forward")  # in later phases ranks wait for each other


def compare_ranks(
    summary: Mapping[str, float],
    device: torch.device | str,
    phases: Sequence[str] = UNTIL_BACKWARD,
    at_least: float = 1.2,
) -> str:
    """Find the rank that the others wait for. All ranks must call it; a few hundred bytes are gathered.

    In a step that ends with a common all-reduce all ranks take the same time, because the fast ones wait. So the time
    before the all-reduce is compared.

    Args:
        summary: summary of this rank's :class:`~lightning_fasttrain.run.StepTimer`.
        device: this rank's device.
        phases: phases in which no rank waits for another. With sharded parameters, leave out the forward, in which
            ranks do wait.
        at_least: minimum ratio to the median of the others; in addition, 10% of the step must be lost.

    Returns:
        A sentence, the same on all ranks; "" if no rank is slow, or some have not measured anything yet.

    Example:
        >>> compare_ranks({"step_ms": 10.0, "data_wait_ms": 1.0}, "cpu")
        ''

    Source:
        Ours.
    """
    mine = {"host": socket.gethostname(), **{name: summary.get(f"{name}_ms", 0.0) for name in (*phases, "step")}}
    everyone = [unpack(state) for state in gather(pack(mine), torch.device(device))]
    # A rank without measurements has a step of 0 ms.
    if len(everyone) < 2 or not all(row["step"] for row in everyone):
        return ""
    return describe_slowest(everyone, phases, at_least)


def phases_to_compare(model: nn.Module) -> Sequence[str]:
    """Return the phases in which no rank waits for another, which exclude the forward if parameters are sharded."""
    return UNTIL_BACKWARD[:2] if is_sharded(model) else UNTIL_BACKWARD


def describe_slowest(ranks: Sequence[Mapping[str, float | str]], phases: Sequence[str], at_least: float) -> str:
    r"""Return the sentence of :func:`compare_ranks`.

    Args:
        ranks: milliseconds of each rank by phase and for its ``step``, and its ``host``.

    Example:
        >>> fast, slow = {"host": "a", "data_wait": 1.0, "step": 10.0}, {"host": "b", "data_wait": 5.0, "step": 10.0}
        >>> print(describe_slowest([fast, slow, fast], ["data_wait"], 1.2).replace("; ", ";\n"))
        rank 1 (b) takes 5 ms until its backward where the others take 1 (5 times as long, most of it data_wait);
        they wait for it 4 ms of a step of 10 ms
    """
    own_ms: list[float] = []
    for rank in ranks:
        own_ms.append(sum(float(rank[phase]) for phase in phases))
    slowest = own_ms.index(max(own_ms))
    others = [rank for number, rank in enumerate(ranks) if number != slowest]
    usual_ms = median(own_ms[:slowest] + own_ms[slowest + 1 :])
    lost_ms, step_ms = own_ms[slowest] - usual_ms, float(ranks[slowest]["step"])
    if own_ms[slowest] < at_least * usual_ms or lost_ms < 0.1 * step_ms:
        return ""

    def lost_in(phase: str) -> float:
        return float(ranks[slowest][phase]) - median(float(rank[phase]) for rank in others)

    # The others may have taken 0 ms.
    times = f"{own_ms[slowest] / usual_ms:.3g} times as long, " if usual_ms else ""
    return (
        f"rank {slowest} ({ranks[slowest]['host']}) takes {own_ms[slowest]:.3g} ms until its backward where the others "
        f"take {usual_ms:.3g} ({times}most of it {max(phases, key=lost_in)}); they wait for it {lost_ms:.3g} ms of a "
        f"step of {step_ms:.3g} ms"
    )
