"""End epochs after the same number of batches on all ranks."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import IterableDataset

from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import ControlGroup, rank_count
from lightning_fasttrain.core.host.loader_wrapper import find_innermost, wrap_training_loaders
from lightning_fasttrain.core.messages import number_of, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.loaders.device_prefetch import AheadLoader, StatefulAheadLoader, can_resume
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import Facts

_END = object()


@check_arguments
def even_epochs(loader: Iterable[object]) -> "EvenLoader":
    """Wrap a loader so that every pass ends on all ranks after as many batches as the shortest rank has.

    Where all ranks know the length of their loaders they compare it once, here. Otherwise each rank fetches a batch
    ahead and all exchange whether they have one: one byte on the CPU, over gloo, per batch. The exchange starts when a
    batch is yielded and its result is read when the next is requested, so it overlaps with the step.

    The remaining batches of the longer ranks are not trained on in this pass; with shuffling they differ from pass to
    pass. With one process nothing is done. With several, all must call this, and all must advance to the same batch.

    A loader that can resume does so in the middle of a pass. With :func:`~lightning_fasttrain.checkpoint.resumable`, a
    state that is saved after a pass begins the next one; torchdata's loader first returns what was left out.

    Args:
        loader: a ``DataLoader`` or any other iterable. Its attributes are forwarded.

    Returns:
        The wrapped loader. ``left_out`` is the number of batches of this rank that the last pass left out, as far as it
        is known without reading them; ``close()`` frees the process group.

    Example:
        >>> list(even_epochs([1, 2, 3]))
        [1, 2, 3]

    Source:
        ``torch.distributed.algorithms.Join`` continues instead, with a collective that shadows each of the step's. It
        must know all of them; it knows those of DDP, but not those of FSDP2, of metrics and of the user.
    """
    return StatefulEvenLoader(loader) if can_resume(loader) else EvenLoader(loader)


class EvenLoader(AheadLoader):
    """See :func:`even_epochs`."""

    _resumes = False  # the next pass begins at a position that was loaded

    def __init__(self, inner: Iterable[Any]) -> None:
        super().__init__(inner)
        self._left_out = 0
        self._length: int | None = None
        self._ranks = ControlGroup.apart() if rank_count() > 1 else None
        if self._ranks is not None:
            self._compare_lengths(self._ranks)

    @property
    def left_out(self) -> int:
        """Number of this rank's batches that the last pass left out, as far as it is known without reading them."""
        return self._left_out

    def __len__(self) -> int:
        if self._ranks is None:
            return len(self.inner)
        if self._length is None:
            raise TypeError("a rank does not know the length of its loader")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.inner)  # now, as for the plain loader: it may draw random numbers
        return batches if self._ranks is None else self._iterate(self._ranks, batches)

    def close(self) -> None:
        """Free the process group over which the ranks vote."""
        if self._ranks is not None:
            self._ranks.close()

    def _compare_lengths(self, ranks: ControlGroup) -> None:
        mine = _length_of(self.inner)
        known = -1 if mine is None else mine
        ranks.vote(known, -known)
        longest, shortest = ranks.read_vote()
        shortest = -shortest
        if shortest < 0:
            return
        self._length, self._left_out = shortest, (mine or 0) - shortest
        if longest > shortest:
            most = f"up to {number_of(longest - shortest, 'batch', 'batches')} per rank are left out"
            say("EvenEpochs: ranks have %d to %d batches; epochs end after %d, %s", shortest, longest, shortest, most)

    def _iterate(self, ranks: ControlGroup, batches: Iterator[Any]) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, False  # with the first batch, since Lightning may iterate again before
        self._hand_out(None)
        if self._length is None or resumes:  # of the rest of a pass no rank knows the length
            yield from self._iterate_together(ranks, batches)
        else:
            yield from islice(batches, self._length)
        self._end_pass()

    def _end_pass(self) -> None:
        """Note that a pass is over, also for a rank that has further batches."""
        self._hand_out(None)

    def _iterate_together(self, ranks: ControlGroup, batches: Iterator[Any]) -> Iterator[Any]:
        ranks.read_vote()  # of an unfinished pass
        ahead = self._fetch(ranks, batches)
        while not any(ranks.read_vote()):
            batch, state = ahead
            ahead = self._fetch(ranks, batches)
            self._hand_out(state)
            yield batch
        self._left_out = int(ahead[0] is not _END)

    def _fetch(self, ranks: ControlGroup, batches: Iterator[Any]) -> tuple[Any, Any]:
        """Fetch the next batch and the loader's state after it, and start the vote on whether a rank has none."""
        batch = next(batches, _END)
        ranks.vote(batch is _END)
        return batch, self._state_now()


class StatefulEvenLoader(StatefulAheadLoader, EvenLoader):
    """An even loader over a loader that can resume."""

    def load_state_dict(self, state: object) -> None:
        super().load_state_dict(state)
        self._resumes = True

    def _end_pass(self) -> None:
        inner = self.inner
        while isinstance(inner, StatefulAheadLoader):
            inner = inner.inner
        # Others say that a pass is over where its last batch was asked for.
        self._hand_out(inner.between_passes() if isinstance(inner, ResumableLoader) else None)


def _length_of(loader: Any) -> int | None:
    """Return the number of batches; None where the loader may be wrong about it."""
    if isinstance(getattr(find_innermost(loader), "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class EvenEpochs(Technique):
    """End epochs after the same number of batches on all ranks, those of the shortest rank.

    Otherwise the rank with fewer batches ends its epoch early, and the others wait for its gradients until a timeout.
    Acts where the strategy processes its training loaders. ``num_training_batches``, ``global_step`` and schedules are
    then the same on all ranks. With :class:`~lightning_fasttrain.ExactResume` a run resumes exactly, but needs
    ``strict=False``, since a checkpoint describes the data of the first rank.

    Example:
        >>> even = EvenEpochs()

    Source:
        See :func:`~lightning_fasttrain.loaders.even_epochs`.
    """

    effect: ClassVar[str] = "epochs end after the same number of batches on all ranks"
    when: ClassVar[str] = "data is split over ranks by files or streams; not with a DistributedSampler, which is even"
    in_a_loop: ClassVar[str] = "loaders.even_epochs(loader)"
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.devices == 1:
            return "there is one device, which has all batches"
        return None

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
            while made and not trainer.interrupted:  # the other ranks may not take part
                made.pop().close()

        return undo
