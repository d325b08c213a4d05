"""How an attempt went on all ranks: heard on a process group of its own, before any of them acts on it."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.messages import explain

_HEARD_WITHIN = timedelta(seconds=10)  # a rank that fails ends then, whether or not the others have listened
_RANKS = 2**24  # more than there will be


class Outcome(IntEnum):
    """How an attempt went; the worst of all ranks counts."""

    FITS = 0
    TOO_LARGE = 1
    TOO_LARGE_IN_ONES = 2  # out of memory one sample at a time
    FAILED = 3


@dataclass(frozen=True)
class Verdict:
    """What all ranks heard.

    Attributes:
        outcome: the worst.
        rank: one that had it.
        most: the largest useful number of parts of any rank, so that all go on with the same number.
    """

    outcome: Outcome
    rank: int
    most: int


class Agreement:
    """Each rank says how its attempt went, and hears the worst of all.

    One all-reduce of two numbers between host processes, so no device is waited for. Nothing else runs on its group:
    what a rank says here is never taken for part of another's collective. A rank that is gone is an error at once,
    one that does not answer is after the group's timeout.

    Args:
        group: of gloo, for this alone; None in a single process.

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
        """Raises: RuntimeError: a rank is gone or did not answer in time."""
        if self._group is None:
            return Verdict(outcome, 0, most)
        said, work = self._say(outcome, most)
        try:
            work.wait()
        except RuntimeError as error:
            reason = f"{error}".partition("\n")[0].rstrip(".")
            way_out = "Look at the first error in the output of the other ranks"
            raise RuntimeError(explain("a rank is gone, or did not answer in time", reason, way_out)) from error
        worst, most = map(int, said.tolist())
        return Verdict(Outcome(worst // _RANKS), worst % _RANKS, most)

    def give_up(self) -> None:
        """Tell the others of an error that is this rank's own, and do not wait for them for long."""
        if self._group is not None:
            _, work = self._say(Outcome.FAILED, 0)
            with suppress(RuntimeError):
                work.wait(_HEARD_WITHIN)

    def _say(self, outcome: Outcome, most: int) -> tuple[torch.Tensor, Any]:
        # One maximum tells both: the worst outcome, and a rank that had it.
        said = torch.tensor([outcome * _RANKS + dist.get_rank(), most], dtype=torch.int64, device="cpu")
        return said, dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group, async_op=True)
