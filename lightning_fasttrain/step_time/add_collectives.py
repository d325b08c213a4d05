"""Add the collectives of DDP and ZeRO to a recorded step, whose engines do not run on tensors without memory."""

from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch.strategies import DDPStrategy

from lightning_fasttrain.core.host.lightning import ddp_bucket
from lightning_fasttrain.memory.one_rank import OneRank, RankStates, RankTraffic
from lightning_fasttrain.step_time.record_step import (
    GATHERS,
    REDUCTIONS,
    Collective,
    Event,
    Kernel,
    RecordedStep,
)

# Place of the event before which a collective starts, the collective, place of the kernel that waits for it.
Added = tuple[int, Collective, int]


def add_collectives(step: RecordedStep, rank: OneRank) -> RecordedStep:
    """Return the step with the collectives that its trace does not show.

    Args:
        step: as recorded.
        rank: the rank that it is of, under its strategy.
    """
    ranks = tuple(range(rank.world))
    if rank.world == 1:
        return step
    if rank.states is not None and rank.states.traffic is not None:
        return _add_zero(step, ranks, rank.states, rank.states.traffic)
    # Lightning's strategy for DeepSpeed is one for DDP too.
    if isinstance(rank.strategy, DDPStrategy):
        return insert(step, _reduce(step, ranks, ddp_bucket(rank.strategy), each=False, kind="all-reduce"))
    return step


def _add_zero(step: RecordedStep, ranks: tuple[int, ...], states: RankStates, traffic: RankTraffic) -> RecordedStep:
    kind = "reduce-scatter" if traffic.scatters else "all-reduce"
    added = _reduce(step, ranks, traffic.bucket, traffic.each_micro_batch, kind)
    if traffic.fetched:
        added += _fetch(step, ranks, traffic)
    if traffic.updated:
        end = len(step.events)
        gather = Collective("all-gather", traffic.updated // traffic.updates, ranks, GATHERS)
        added += [(end, gather, end)] * traffic.updates
    # The hooks of modules are spread over the kernels of forward and backward.
    hooks = traffic.modules * len(step.starts) / max(step.update, 1)
    events: list[Event] = []
    for place, event in enumerate(step.events):
        if isinstance(event, Kernel) and place >= step.update:
            # Each rank updates its shard.
            share = states.step_share
            event = replace(event, read=int(event.read * share), written=int(event.written * share))
        elif isinstance(event, Kernel) and hooks:
            event = replace(event, hooks=hooks)
        events.append(event)
    return insert(replace(step, events=events), added)


def _reduce(step: RecordedStep, ranks: tuple[int, ...], bucket: int, each: bool, kind: str) -> list[Added]:
    """Return reductions of gradients in buckets, each when its last gradient is complete."""
    added: list[Added] = []
    ends = [*step.starts[1:], step.update]
    for start, end in list(zip(step.starts, ends, strict=True))[0 if each else -1 :]:
        gradients = [(place, nbytes) for place, nbytes in step.gradients if start < place <= end]
        filled = 0
        for number, (place, nbytes) in enumerate(gradients, start=1):
            filled += nbytes
            if filled >= bucket or number == len(gradients):
                added.append((place, Collective(kind, filled, ranks, REDUCTIONS, after=0), step.update))
                filled = 0
    return added


def _fetch(step: RecordedStep, ranks: tuple[int, ...], traffic: RankTraffic) -> list[Added]:
    """Return gathers of parameters, spread over forward and backward, each one before the one before is used up."""
    added: list[Added] = []
    for number, start in enumerate(step.starts):
        end = step.starts[number + 1] if number + 1 < len(step.starts) else step.update
        count = max(2, -(-traffic.fetched // traffic.prefetch))
        places = [start + (end - start) * part // count for part in range(count)]
        for part, place in enumerate(places):
            gather = Collective("all-gather", traffic.fetched // count, ranks, GATHERS)
            added.append((places[max(part - 1, 0)], gather, place))
    return added


def insert(step: RecordedStep, added: Sequence[Added]) -> RecordedStep:
    """Return the step with further collectives; all places in it are moved."""
    before: dict[int, list[tuple[Collective, int]]] = {}
    for place, collective, waiting in added:
        before.setdefault(place, []).append((collective, waiting))
    events: list[Event] = []
    moved_to: list[int] = []
    waits_at: dict[int, list[int]] = {}
    for place in range(len(step.events) + 1):
        for collective, waiting in before.get(place, []):
            waits_at.setdefault(waiting, []).append(len(events))
            after = len(events) - 1 if collective.after >= 0 else -1
            events.append(replace(collective, after=after))
        moved_to.append(len(events))
        if place == len(step.events):
            break
        event = step.events[place]
        waits = tuple(moved_to[wait] for wait in event.waits)
        if isinstance(event, Kernel):
            waits += tuple(waits_at.pop(place, ()))
            events.append(replace(event, waits=waits))
        else:
            after = moved_to[event.after] if event.after >= 0 else -1
            events.append(replace(event, waits=waits, after=after))
    starts = [moved_to[start] for start in step.starts]
    gradients = [(moved_to[place], nbytes) for place, nbytes in step.gradients]
    return replace(step, events=events, starts=starts, update=moved_to[step.update], gradients=gradients)
