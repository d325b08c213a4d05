"""Ranks whose loaders hold unequal numbers of batches end their epochs together."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.messages import number_of, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.data.loaders.loader_wrapper import WrappedLoader, find_innermost, wrap_training_loaders
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.facts import Facts

_END = object()


def even_epochs(loader: Iterable[Any]) -> "EvenLoader":
    """Wrap a loader so that every pass over it ends after as many batches on each rank: those of the shortest.

    Where all ranks know the length of their loaders they compare it once, here. Otherwise each rank fetches a batch
    ahead and all say whether they have one: one byte on the CPU, by gloo, for each batch. The question is sent when a
    batch is handed out and the answer read when the next is asked for, so it travels during the step.

    What the longer ranks have left is not trained on in this pass; with shuffling it is something else each time.
    With one process nothing is done. With several, all must call this, and all must go on to the same batch.

    Args:
        loader: a ``DataLoader``, or anything to iterate over. Its attributes shine through.

    Returns:
        The wrapped loader. ``left_out`` is how many batches of this rank were left out of the last pass, as far as is
        known without reading them; ``close()`` ends the talk between ranks.

    Example:
        >>> list(even_epochs([1, 2, 3]))
        [1, 2, 3]

    Source:
        ``torch.distributed.algorithms.Join`` goes on instead, with a collective that shadows each of the step's. It
        has to know them all; DDP's are known to it, those of FSDP2, of metrics and of the user's are not.
    """
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return StatefulEvenLoader(loader) if stateful else EvenLoader(loader)


class EvenLoader(WrappedLoader):
    """See :func:`even_epochs`."""

    def __init__(self, inner: Iterable[Any]) -> None:
        super().__init__(inner)
        self._left_out = 0
        self._group: dist.ProcessGroup | None = None
        self._vote = torch.zeros(1, dtype=torch.int64)  # lives as long as the group, whose thread uses it
        self._work: dist.Work | None = None
        self._length: int | None = None
        self._alone = rank_count() == 1
        if not self._alone:
            self._group = dist.new_group(backend="gloo")  # its own: a step's collectives go another way
            self._compare_lengths()

    @property
    def left_out(self) -> int:
        """Batches of this rank that were left out of the last pass, as far as is known without reading them."""
        return self._left_out

    def __len__(self) -> int:
        if self._alone:
            return len(self.inner)
        if self._length is None:
            raise TypeError("a rank does not know the length of its loader")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.inner)  # now, as the plain loader's would be, since it may draw random numbers
        if self._alone:
            return batches
        return self._iterate_together(batches) if self._length is None else islice(batches, self._length)

    def close(self) -> None:
        """Free what the ranks talk through."""
        if self._group is not None and dist.is_initialized():
            self._wait()  # for a question of a pass that was not finished
            dist.destroy_process_group(self._group)
        self._group = None

    def _compare_lengths(self) -> None:
        mine = _length_of(self.inner)
        shortest, longest = self._extremes(-1 if mine is None else mine)
        if shortest < 0:
            return
        self._length, self._left_out = shortest, (mine or 0) - shortest
        if longest > shortest:
            most = f"up to {number_of(longest - shortest, 'batch', 'batches')} of a rank are left out"
            say("EvenEpochs: ranks have %d to %d batches; epochs end after %d, %s", shortest, longest, shortest, most)

    def _extremes(self, number: int) -> tuple[int, int]:
        # The minimum of the negated numbers is the maximum: one call for both.
        both = torch.tensor([number, -number])
        dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group)
        return int(both[0]), -int(both[1])

    def _iterate_together(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._wait()  # of a pass that was not finished
        ahead = self._fetch(batches)
        while self._wait():
            batch, state = ahead
            ahead = self._fetch(batches)
            self._hand_out(state)
            yield batch
        self._left_out = int(ahead[0] is not _END)

    def _fetch(self, batches: Iterator[Any]) -> tuple[Any, Any]:
        """The next batch, and the loader's state before the one after it; asks the others whether they have one."""
        batch = next(batches, _END)
        self._vote.fill_(batch is not _END)
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MIN, group=self._group, async_op=True)
        return batch, self._state_now()

    def _wait(self) -> bool:
        """Whether all ranks had a batch when they were asked last."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return bool(self._vote)

    def _state_now(self) -> Any:
        return None

    def _hand_out(self, state: Any) -> None:
        pass


class StatefulEvenLoader(EvenLoader):
    """Over a loader that can resume: its state is that of the last batch handed out."""

    def __init__(self, inner: Iterable[Any]) -> None:
        super().__init__(inner)
        self._state: Any = None

    def _state_now(self) -> Any:
        return self.inner.state_dict()

    def _hand_out(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state_now() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = None
        self.inner.load_state_dict(state)


def _length_of(loader: Any) -> int | None:
    """How many batches it has; None where it may be wrong about it."""
    if isinstance(getattr(find_innermost(loader), "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class EvenEpochs(Technique):
    """End epochs together where ranks have unequal numbers of batches, after those of the shortest.

    Without it the rank with fewer batches goes on to the end of its epoch, and the others wait for its gradients until
    a timeout. Acts where the strategy takes its training loaders. ``num_training_batches``, ``global_step`` and
    schedules are the same on all ranks then. With :class:`~lightning_fasttrain.ExactResume` a run goes on exactly, but
    needs ``strict=False``: what a checkpoint says of the data is what the first rank has.

    Example:
        >>> even = EvenEpochs()

    Source:
        See :func:`~lightning_fasttrain.data.even_epochs`.
    """

    effect: ClassVar[str] = "ranks with unequal numbers of batches end their epochs together"
    when: ClassVar[str] = "data is split over ranks by files or streams; not with a DistributedSampler, which is even"
    in_a_loop: ClassVar[str] = "data.even_epochs(loader)"
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return "there is one device, with all the batches" if facts.devices == 1 else None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        made: list[EvenLoader] = []

        def wrap(loader: Any) -> EvenLoader:
            made.append(even_epochs(loader))
            return made[-1]

        leave = wrap_training_loaders(trainer, wrap)

        def undo() -> None:
            leave()
            while made and not trainer.interrupted:  # the other ranks may not come
                made.pop().close()

        return undo
