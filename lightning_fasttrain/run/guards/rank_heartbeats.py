"""Exchange the progress of the ranks through the process group's store, without collectives."""

import json
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_PATIENCE_S = 3.0  # a store in a stopped process does not answer


@dataclass(frozen=True)
class Position:
    """Progress of a rank.

    Attributes:
        rank: the rank that this describes.
        seq: counter of its watching thread; a rank whose counter does not change is silent.
        run: number of the watched run in its process, one fit after the other.
        step: batches begun in this run.
        beats: signs of life since the batch began.
        phase: the phase that it was about to start.
        quiet_s: seconds since then.
        over: it has been quiet for longer than allowed.
        told: it has shown its stacks, and waits for the end.
        error: the error with which it failed, if any.
        where: host and process.
        stack: stack of the training thread, once it is over the limit.
    """

    rank: int
    seq: int = 0
    run: int = 0
    step: int = 0
    beats: int = 0
    phase: str = ""
    quiet_s: float = 0.0
    over: bool = False
    told: bool = False
    error: str = ""
    where: str = ""
    stack: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: step {self.step}, {self.phase}, quiet for {self.quiet_s:.0f} s ({self.where})"


class RankBoard:
    """Keys in the store of the default process group, over a separate connection. No method waits for a rank."""

    def __init__(self) -> None:
        store: dist.Store = dist.distributed_c10d._get_default_store()
        # The process group's own connection may be blocked by a waiting thread.
        self._store = store.clone() if hasattr(store, "clone") else store
        if self._store is not store:
            self._store.set_timeout(timedelta(seconds=_PATIENCE_S))
        self._prefix = "fasttrain/hang_watch"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._asking: threading.Thread | None = None

    def publish(self, position: Position) -> None:
        self._try(lambda: self._store.set(f"{self._prefix}/{self.rank}", json.dumps(asdict(position))))

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Position] | None:
        """Return the known positions of the other ranks; None if the store does not answer."""
        wanted = range(self.size) if ranks is None else ranks

        def read_others() -> dict[int, Position]:
            found: dict[int, Position] = {}
            for rank in wanted:
                key = f"{self._prefix}/{rank}"
                # get() waits for a missing key; check() does not.
                if rank != self.rank and self._store.check([key]):
                    found[rank] = Position(**json.loads(self._store.get(key)))
            return found

        return self._try(read_others)

    def decide(self, silent: Collection[int]) -> None:
        """Announce that the run has come to a stop, and which ranks are silent."""
        self._try(lambda: self._store.set(f"{self._prefix}/decided", json.dumps(sorted(silent))))

    def decided(self) -> set[int] | None:
        """Return the silent ranks, if another rank has announced that the run has come to a stop."""
        key = f"{self._prefix}/decided"
        found = self._try(lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None)
        if found is None:
            return None
        return set(found)

    def end(self) -> None:
        """Announce that everything has been reported."""
        self._try(lambda: self._store.set(f"{self._prefix}/end", "1"))

    def has_ended(self) -> bool:
        return bool(self._try(lambda: self._store.check([f"{self._prefix}/end"])))

    def leave(self) -> None:
        """Remove this rank's position, since it has left the loop normally."""
        self._try(lambda: self._store.delete_key(f"{self._prefix}/{self.rank}"))

    def _try(self, ask: Callable[[], Answer]) -> Answer | None:
        """Call ``ask`` in a thread, since socket timeouts do not hold in all states of the other side."""
        # If the last request still waits, one thread is enough.
        if self._asking is not None and self._asking.is_alive():
            return None
        found: list[Answer] = []

        def run() -> None:
            # The store may be gone, or not answer in time.
            with suppress(RuntimeError, ValueError):
                found.append(ask())

        # Daemon: it must not keep the process from ending.
        self._asking = threading.Thread(target=run, daemon=True, name="fasttrain-rank-board")
        self._asking.start()
        self._asking.join(_PATIENCE_S)
        return next(iter(found), None)


def find_silent_ranks(
    first: dict[int, tuple[float, int]], now: float, seen: dict[int, Position], limit_s: float
) -> set[int]:
    """Return ranks whose ``seq`` has not changed for ``limit_s``; ``first`` records when each value was first seen.

    Example:
        >>> first, seen = {}, {1: Position(1, seq=7)}
        >>> [find_silent_ranks(first, now, seen, limit_s=2.0) for now in (0.0, 3.0)]
        [set(), {1}]
    """
    for rank, position in seen.items():
        # A counter, not a time: the clocks of two machines differ.
        if rank not in first or first[rank][1] != position.seq:
            first[rank] = (now, position.seq)
    return {rank for rank in seen if now - first[rank][0] >= limit_s}


def describe(mine: Position, others: dict[int, Position] | None, silent: Collection[int], size: int) -> str:
    """Describe where each rank is and which one the others wait for; ``others`` is None if the store does not answer.

    Example:
        >>> mine = Position(0, step=3, beats=2, phase="backward", quiet_s=9.0, where="a:1")
        >>> print(describe(mine, {1: Position(1, step=3, beats=1, phase="forward", quiet_s=9.0, where="a:2")}, (), 2))
        rank 0: step 3, backward, quiet for 9 s (a:1)
        rank 1: step 3, forward, quiet for 9 s (a:2)
        rank 1 is the furthest behind: the others wait for it.
    """
    if size == 1:
        return str(mine)
    if others is None:
        holder = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return f"{mine}\nThe process group's store does not answer: {holder}, which holds it, has stopped or ended."
    everyone = {**others, mine.rank: mine}
    lines = []
    for rank in range(size):
        lines.append(str(everyone.get(rank, f"rank {rank}: no position")))
    return "\n".join([*lines, *_name_blocking_ranks(everyone, silent, size)])


def _name_blocking_ranks(everyone: dict[int, Position], silent: Collection[int], size: int) -> list[str]:
    """Name the ranks that block the others, from the most to the least informative: errors, silence, absence."""
    failed = [rank for rank, position in sorted(everyone.items()) if position.error]
    absent = [rank for rank in range(size) if rank not in everyone]
    if failed:
        lines = [f"rank {rank} failed with {everyone[rank].error}. The others wait for it." for rank in failed]
        return [*lines, *(f"It is at\n{everyone[rank].stack}" for rank in failed if everyone[rank].stack)]
    if silent:
        why = "stopped, ended, or holding Python's lock in native code. Its last position is above"
        return [f"{_ranks(silent)} silent: {why}. The others wait for it."]
    if absent:
        return [f"{_ranks(absent)} not in the loop: it has left or never started. The others wait for it."]
    places = {rank: (p.run, p.step, p.beats) for rank, p in sorted(everyone.items())}
    behind = [rank for rank, place in places.items() if place == min(places.values())]
    if len(behind) == size:
        return ["All ranks are at the same position. Their stacks show which of them does not wait for another rank."]
    stacks = [f"rank {rank} is at\n{everyone[rank].stack}" for rank in behind if everyone[rank].stack]
    return [f"{_ranks(behind)} the furthest behind: the others wait for it.", *stacks]


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    if len(ranks) == 1:
        return f"rank {names} is"
    return f"ranks {names} are"
