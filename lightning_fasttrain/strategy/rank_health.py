"""Health check of all ranks, on a separate process group with a time limit; errors are shown before ranks wait."""

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.messages import explain, write_to_stderr

# A failing rank ends then, whether or not the others have received its status.
_HEARD_WITHIN = timedelta(seconds=10)
_NO_ANSWER = "this rank waits for it, and cannot continue alone"
_TAG = 1
_WAY_OUT = "Look at the first error in the output of the other ranks"


# (purpose, timeout) → (default group, group of this purpose); torch holds the groups until they are destroyed.
_groups: dict[tuple[str | None, timedelta | None], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def own_group(timeout: timedelta | None = None, purpose: str | None = "health check") -> dist.ProcessGroup | None:
    """Return a gloo group of all processes, or None in a single process.

    Later runs of these processes use the same group for the same purpose, since each group has threads that wake up 100
    times a second; without a purpose it is a new one. All processes must call it, in the training thread.
    """
    if rank_count() == 1:
        return None
    known = _groups.get((purpose, timeout))
    if known is not None and purpose is not None:
        world, group = (of() for of in known)
        if world is dist.group.WORLD and group is not None:
            return group
    # Every process is a member, so each of them gets a group.
    group: Any = dist.new_group(backend="gloo", timeout=timeout)
    _groups[purpose, timeout] = weakref.ref(dist.group.WORLD), weakref.ref(group)
    return group


def _forget(group: object) -> None:
    """Have later runs create a new group: messages of a failed run may still be in this one."""
    for key, (_, known) in list(_groups.items()):
        if known() is group:
            del _groups[key]


class RollCall:
    """Health check in which each rank reports whether it succeeded, and learns whether all did.

    A rank that is gone counts as an error immediately. Nothing else runs on the group, so that a rank's report is
    never mistaken for part of another rank's barrier.

    Args:
        group: a gloo group for this purpose only; None in a single process.

    Attributes:
        broken: whether a rank is gone or did not answer in time, so that collectives over all ranks must not be
            started.

    Example:
        >>> call = RollCall(None)
        >>> call(True), call(False)
        (True, False)

    Source:
        Ours.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # It must live as long as gloo's thread may read it.
        self._fine = torch.ones(1, dtype=torch.uint8, device="cpu")
        self.broken = False

    def __call__(self, fine: bool) -> bool:
        """Return whether all ranks are fine; a rank that is not shows its error before it waits.

        Raises:
            RuntimeError: a rank is gone, or did not answer in time.
        """
        if self._group is None:
            return fine
        if not fine:
            # Shown before waiting for the others, which may wait for this rank.
            _show(sys.exception())
        if not self.broken:
            try:
                self._ask(fine).wait()
                return bool(self._fine)
            except RuntimeError as error:
                self._break()
                reason = f"{error}".partition("\n")[0].rstrip(".")
        else:
            reason = "an earlier check failed"
        if not fine:  # this rank's own error is the one to raise
            return False
        raise RuntimeError(explain("a rank is gone, or did not answer in time", reason, _WAY_OUT))

    @contextmanager
    def all_or_none(self, doing: str) -> Iterator[None]:
        """Run a rank's own work; an error on one rank ends all ranks.

        Raises:
            RuntimeError: another rank failed, or is gone.
        """
        try:
            yield
        except BaseException as error:
            if self._group is not None and not self.broken:
                _show(error)
                with suppress(RuntimeError):
                    # A short wait: the others may be gone too, and the error must be raised.
                    self._ask(False).wait(_HEARD_WITHIN)
                self._break()
            raise
        if not self(True):
            self._break()
            raise RuntimeError(explain(f"{doing} failed on another rank", "this rank cannot continue alone", _WAY_OUT))

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """End this process if another rank ends or fails meanwhile, for work that would wait for that rank.

        Each rank watches the next one, so that one that ends is followed by all. A thread does it, since a collective
        that waits cannot be interrupted; it lets this rank find out by itself for some seconds first.
        """
        if self._group is None:
            yield
            return
        others, left = rank_count(), threading.Event()
        ahead, behind = (rank_here() + 1) % others, (rank_here() - 1) % others
        is_fine = torch.zeros(1, dtype=torch.uint8, device="cpu")
        coming = self._group.recv([is_fine], ahead, _TAG)

        def watch() -> None:
            with suppress(RuntimeError):  # the rank is gone
                coming.wait()
            if not is_fine and not left.wait(_HEARD_WITHIN.total_seconds()):
                write_to_stderr(explain(f"rank {ahead} failed or is gone in {doing}", _NO_ANSWER, _WAY_OUT) + "\n")
                os._exit(1)  # sys.exit would end only this thread

        watcher = threading.Thread(target=watch, daemon=True, name="fasttrain-rank-watch")
        watcher.start()
        try:
            yield
        except BaseException as error:
            _show(error)
            with suppress(RuntimeError):
                self._group.send([torch.zeros_like(is_fine)], behind, _TAG).wait(_HEARD_WITHIN)
            raise
        else:
            self._group.send([torch.ones_like(is_fine)], behind, _TAG).wait()
            watcher.join()
        finally:
            left.set()

    def _break(self) -> None:
        self.broken = True
        _forget(self._group)

    def _ask(self, fine: bool) -> Any:
        self._fine.fill_(fine)
        return dist.all_reduce(self._fine, dist.ReduceOp.MIN, group=self._group, async_op=True)


def _show(error: BaseException | None) -> None:
    said = "without an error\n"
    if error is not None:
        said = "".join(traceback.format_exception(error))
    write_to_stderr(f"rank {rank_here()} failed:\n{said}")
