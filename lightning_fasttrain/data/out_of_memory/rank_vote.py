"""Agree on the outcome of an attempt over all ranks, on a separate process group, before any rank acts on it."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.messages import explain

_HEARD_WITHIN = timedelta(seconds=10)  # a failing rank exits after this time, received or not
_RANKS = 2**24  # upper bound of the number of ranks


class Outcome(IntEnum):
    """The outcome of an attempt; the worst of all ranks counts."""

    FITS = 0
    TOO_LARGE = 1
    TOO_LARGE_IN_ONES = 2  # out of memory with single samples
    FAILED = 3


@dataclass(frozen=True)
class Verdict:
    """The common result of all ranks.

    Attributes:
        outcome: the worst outcome.
        rank: a rank that had it.
        most: the largest useful number of micro-batches of any rank, so that all continue with the same number.
    """

    outcome: Outcome
    rank: int
    most: int


class Agreement:
    """Exchanges the outcome of an attempt, and returns the worst of all ranks.

    One all-reduce of two integers between host processes, so the device is not synchronized. The group carries no other
    collectives, so a message cannot be mistaken for part of another one. A rank that has exited is an error at once,
    one that does not answer after the group's timeout.

    Args:
        group: a gloo group for this purpose alone; None in a single process.

    Example:
        >>> Agreement()(Outcome.TOO_LARGE, most=8)
        Verdict(outcome=<Outcome.TOO_LARGE: 1>, rank=0, most=8)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def has_others(self) -> bool:
        """Whether there are several ranks."""
        return self._group is not None

    def __call__(self, outcome: Outcome, most: int) -> Verdict:
        """Raises: RuntimeError: a rank has exited or did not answer in time."""
        if self._group is None:
            return Verdict(outcome, 0, most)
        said, work = self._say(outcome, most)
        try:
            work.wait()
        except RuntimeError as error:
            reason = f"{error}".partition("\n")[0].rstrip(".")
            way_out = "Look at the first error in the output of the other ranks"
            raise RuntimeError(explain("a rank has exited or did not answer in time", reason, way_out)) from error
        worst, most = map(int, said.tolist())
        return Verdict(Outcome(worst // _RANKS), worst % _RANKS, most)

    def give_up(self) -> None:
        """Report an error of this rank alone to the others, with a short timeout."""
        if self._group is not None:
            _, work = self._say(Outcome.FAILED, 0)
            with suppress(RuntimeError):
                work.wait(_HEARD_WITHIN)

    def _say(self, outcome: Outcome, most: int) -> tuple[torch.Tensor, Any]:
        # One maximum carries both: the worst outcome, and a rank that had it.
        said = torch.tensor([outcome * _RANKS + dist.get_rank(), most], dtype=torch.int64, device="cpu")
        return said, dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group, async_op=True)
