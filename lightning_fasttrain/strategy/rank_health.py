"""Whether all ranks are fine: asked on a process group of its own, with a time limit, and errors are shown first."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.run.guards.watchdog import write_to_stderr

_HEARD_WITHIN = timedelta(seconds=10)  # a rank that fails ends then, whether or not the others have listened
_WAY_OUT = "Look at the first error in the output of the other ranks"


def own_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A gloo group of all processes; all must call it, in the thread that trains. None in a single process."""
    if rank_count() == 1:
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timeout)  # of which every process is a member
    return group


class RollCall:
    """Each rank says whether it is fine, and hears whether all are; a rank that is gone counts as an error at once.

    Nothing else runs on its group, so that what a rank says here is never taken for a part of another rank's barrier.

    Args:
        group: of gloo, for this alone; None in a single process.

    Attributes:
        broken: a rank is gone or did not answer in time, so nothing that waits for all ranks may be begun.

    Example:
        >>> call = RollCall(None)
        >>> call(True), call(False)
        (True, False)

    Source:
        Ours.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._fine = torch.ones(1, dtype=torch.uint8, device="cpu")  # lives as long as gloo's thread may read it
        self.broken = False

    def __call__(self, fine: bool) -> bool:
        """Whether all ranks are fine. Whoever is not shows its error before it waits.

        Raises:
            RuntimeError: a rank is gone, or did not answer in time.
        """
        if self._group is None:
            return fine
        if not fine:
            _show(sys.exception())  # shown before the others are heard of: this rank may be the reason that they wait
        if not self.broken:
            try:
                self._ask(fine).wait()
                return bool(self._fine)
            except RuntimeError as error:
                self.broken, reason = True, f"{error}".partition("\n")[0].rstrip(".")
        else:
            reason = "so it was before"
        if not fine:  # this rank's own error is the one to raise
            return False
        raise RuntimeError(explain("a rank is gone, or did not answer in time", reason, _WAY_OUT))

    @contextmanager
    def all_or_none(self, doing: str) -> Iterator[None]:
        """Around what a rank does for itself, of which an error must end all ranks.

        Raises:
            RuntimeError: another rank failed, or is gone.
        """
        try:
            yield
        except BaseException as error:
            if self._group is not None and not self.broken:
                _show(error)
                with suppress(RuntimeError):
                    # A short wait: the error is what matters, and the others may be gone themselves.
                    self._ask(False).wait(_HEARD_WITHIN)
                self.broken = True
            raise
        if not self(True):
            self.broken = True
            raise RuntimeError(explain(f"{doing} failed on another rank", "no rank can go on alone", _WAY_OUT))

    def _ask(self, fine: bool) -> Any:
        self._fine.fill_(fine)
        return dist.all_reduce(self._fine, dist.ReduceOp.MIN, group=self._group, async_op=True)


def _show(error: BaseException | None) -> None:
    said = "".join(traceback.format_exception(error)) if error is not None else "without an error\n"
    write_to_stderr(f"rank {rank_here()} failed:\n{said}")
