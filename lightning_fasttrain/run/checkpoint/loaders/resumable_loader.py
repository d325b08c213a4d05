"""A loader that can be stopped at any batch and resumed, in another process, at the next one."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import passes_of, set_passes_of, without_fabric
from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader
from lightning_fasttrain.core.messages import explain, note_once, say, warn
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.run.checkpoint.loaders.dataset_state import (
    DatasetStates,
    generator_state,
    generator_states,
    generators_of,
    keeps_position,
    refuse_unseedable,
    restore_generators,
    seed_of_pass,
    seeded_rest,
)

_REMEMBERED = 6  # positions: more than anything between the loader and the training step prefetches


@check_arguments
def resumable(loader: Iterable[object], seed_samples: bool = False) -> Any:
    """Wrap a loader so that it has ``state_dict`` and ``load_state_dict``, and resumes at its position.

    The contents of a batch follow from the generator states at the beginning of the pass over the data. These states
    are saved with the number of batches returned; after ``load_state_dict`` the next pass begins there and skips that
    many batches: by their indices alone if a map-style dataset is read in this process, or with ``seed_samples``; by
    the position that the dataset itself keeps, here or in each worker, if it has ``state_dict`` and
    ``load_state_dict``; otherwise by reading them again, which takes time and is logged. Afterwards the previous random
    state is restored.

    The saved generators are those of torch, Python and NumPy and those of the loader, its samplers and its dataset;
    the workers' seeds follow from them. ``persistent_workers`` are restarted for each pass, since their earlier random
    draws could not be reproduced. Other state of a sampler is not saved, nor is a dataset's between two passes. An
    ``IterableDataset`` that is read in this process and draws from the global generators shares them with training and
    cannot be replayed: give it its own generator. For torch's generator there is a warning.

    Args:
        loader: a ``DataLoader``, the result of ``fabric.setup_dataloaders``, or any object that can be iterated
            repeatedly. Its attributes are forwarded.
        seed_samples: seed the global generators for each sample, by the pass and the sample's index. Samples then
            depend neither on the worker nor on those read before, so that resuming with workers reads nothing again,
            and may have another number of workers. Random augmentations draw other numbers than without it.

    Returns:
        The wrapped loader, which is iterated over as before; ``loader`` itself if it has ``state_dict`` already.

    Raises:
        TypeError: ``loader`` is an iterator, which ends with its first pass.
        ValueError: ``persistent_workers`` under Fabric; ``seed_samples`` where the loader is not a ``DataLoader`` of a
            map-style dataset, or the dataset has generators of its own; on iterating: the state is of another kind of
            loader.

    Example:
        A loop that resumes from its checkpoint, bit for bit:

        >>> from lightning_fasttrain.run import random_state, set_random_state
        >>> def train(saved=None, stop=99):
        ...     loader, seen, first = resumable(DataLoader(range(6), batch_size=2, shuffle=True)), [], 0
        ...     if saved is not None:
        ...         first, seen = saved["epoch"], list(saved["seen"])
        ...         loader.load_state_dict(saved["loader"])
        ...         set_random_state(saved["random"])  # last: from here on everything draws as it would have
        ...     for epoch in range(first, 3):
        ...         for batch in loader:
        ...             seen.append(batch + torch.rand(2))
        ...             if len(seen) == stop:
        ...                 return {"epoch": epoch, "seen": seen, "loader": loader.state_dict(),
        ...                         "random": random_state()}
        ...     return seen
        >>> _ = torch.manual_seed(3)
        >>> whole = train()
        >>> _ = torch.manual_seed(3)
        >>> torch.equal(torch.stack(whole), torch.stack(train(train(stop=5))))
        True

    Source:
        torchdata's ``StatefulDataLoader``, whose protocol for datasets this is; it has its own workers and samplers.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    return ResumableLoader(loader, seed_samples)


class ResumableLoader(WrappedLoader):
    """The wrapper that :func:`resumable` returns."""

    # Whether, after a load, a pass begins with its first batch, since Lightning may iterate again before.
    _begins_late = False

    def __init__(self, inner: Iterable[Any], seed_samples: bool = False) -> None:
        if isinstance(inner, Iterator):
            why = "an iterator ends with its first pass, so a later process cannot skip to its position"
            way_out = "Pass a DataLoader, or an object whose __iter__ starts over"
            raise TypeError(explain(f"loader={type(inner).__name__}", why, way_out))
        super().__init__(inner)
        loader: Any = without_fabric(inner)
        torchs = isinstance(loader, DataLoader)
        if torchs and loader.persistent_workers and loader is not inner:
            why = "their random draws in earlier passes cannot be reproduced, and Fabric starts them itself"
            raise ValueError(explain("persistent_workers=True under Fabric", why, "Use persistent_workers=False"))
        if seed_samples:
            refuse_unseedable(loader)
        self._seeds = seed_samples
        self._persistent = torchs and loader.persistent_workers
        self._in_process = not torchs or loader.num_workers == 0
        self._keeps_position = torchs and not seed_samples and keeps_position(loader.dataset)
        streams = torchs and isinstance(loader.dataset, IterableDataset)
        self._watched = self._in_process and streams and not self._keeps_position
        self._handed_out = self._repeats = 0
        self._positions: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_REMEMBERED)
        self._to_resume: dict[str, Any] | None = None
        self._lazy = False
        # Passes that start with the first batch: of this loader, or of all that are read side by side.
        self.waiting: list[_Pass] = []
        # For the next pass of persistent workers; None until their first one.
        self._workers_seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        a_pass = _Pass(self)
        if self._to_resume is None and not self._lazy:
            a_pass.begin()
        else:
            self.waiting[:] = [*(other for other in self.waiting if other.loader is not self), a_pass]
        return a_pass

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned; in the body of a loop, that is the current batch."""
        # A finished pass cannot be resumed: the next pass starts from its beginning.
        if self._positions and self._positions[-1][1]["ended"]:
            return self.between_passes()
        return {**self.position(self._handed_out), "random": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; call it before iterating."""
        self._positions.clear()
        self._handed_out = 0
        self._lazy = self._begins_late
        self._to_resume = None
        if state["start"] is None:
            restore_generators(generators_of(self.inner), state["generators"])
            self._workers_seed, self._repeats = state["workers"], 0
            set_passes_of(self.inner, state["calls"])
        else:
            self._to_resume, self._repeats = state, state["repeats"]

    @property
    def handed_out(self) -> int:
        """Number of batches returned since :meth:`count_from`."""
        return self._handed_out

    @property
    def repeats(self) -> int:
        """Number of times the data ended since :meth:`count_from` zero; of several loaders, the shorter ones repeat."""
        return self._repeats

    def between_passes(self) -> dict[str, Any]:
        """Return the state from which the next pass starts at its beginning."""
        states = generator_states(self.inner)
        return {"start": None, "generators": states, "workers": self._workers_seed, "calls": passes_of(self.inner)}

    def position(self, used: int) -> dict[str, Any]:
        """Return the state after ``used`` batches since :meth:`count_from`, regardless of prefetched batches."""
        if not self._positions:  # no batch was requested yet
            # A state that was loaded, and whose pass has not begun, still holds.
            return self._to_resume or self.between_passes()
        ahead: list[Any] = []  # the random states in which batches were prefetched
        for handed_out, position in reversed(self._positions):
            if position["random"] is not None:
                ahead.insert(0, (position["start"], position["random"]))
            if handed_out <= used:
                # Prefetched batches of the next pass do not belong to this position.
                return {**position, "random": [random for start, random in ahead if start is position["start"]]}
        raise RuntimeError(f"{self._handed_out} batches were fetched and {used} used: too many are prefetched.")

    def count_from(self, used: int) -> None:
        """Set the number of batches returned so far, for :meth:`position`."""
        self._handed_out, self._repeats = used, 0 if used == 0 else self._repeats

    def _begin(self, start: dict[str, Any], given: int, states: DatasetStates | None, known: bool) -> Iterator[Any]:
        """Begin the pass that ``start`` describes, after its first ``given`` batches.

        Args:
            start: state at the beginning of the pass.
            given: see above.
            states: those of the dataset, if it keeps its position.
            known: whether they are at ``given``.
        """
        # Without workers, indices are drawn with the first batch, in another random state than now.
        skipped = given if self._seeds and not self._in_process else 0
        context: AbstractContextManager[None] = nullcontext()
        if states is not None:
            context = states.restored(given if known else 0)
            if known and not (self._in_process and states.by_index):
                skipped = given - states.again
        elif self._seeds:
            context = seeded_rest(without_fabric(self.inner), seed_of_pass(start), skipped)
        with context:
            batches = self._start_workers(start["workers"])
        # Training draws between the start of a pass and its first fetch, which is when samplers draw.
        if given and start["first"] is not None:
            set_random_state(start["first"])
        self._skip(batches, given - skipped, states)
        return batches

    def _start_workers(self, seed: int | None) -> Iterator[Any]:
        inner = self.inner
        if not self._persistent:
            return iter(inner)
        note_once("ExactResume: persistent workers are restarted for each pass, to reproduce their random draws")
        if inner._iterator is not None:
            # A DataLoader keeps the iterator of persistent workers and only resets it, so it would not draw a new seed.
            inner._iterator._shutdown_workers()
            inner._iterator = None
        # A DataLoader draws `_base_seed` from its generator when it makes an iterator, and seeds the workers with it.
        theirs = inner.generator
        # In a later pass persistent workers draw no seed from the common generator.
        if seed is not None:
            inner.generator = torch.Generator().manual_seed(seed)
        try:
            batches = iter(inner)
        finally:
            inner.generator = theirs
        # A function of this pass alone, so a resumed run gets the same seed.
        self._workers_seed = (batches._base_seed + 1) % 2**62
        return batches

    def _skip(self, batches: Iterator[Any], count: int, states: DatasetStates | None) -> None:
        if count == 0:
            return
        map_style = not isinstance(getattr(self.inner, "dataset", None), IterableDataset)
        if isinstance(batches, _SingleProcessDataLoaderIter) and map_style:
            # Only indices are consumed, so no sample is loaded.
            for _ in islice(batches._sampler_iter, count):
                pass
            return
        say("Resuming: reading and dropping %d batches, to reach the saved position", count)
        for batch in islice(batches, count):
            if states is not None:
                states.take(batch)


class _Pass(Iterator[Any]):
    """One pass over the data of a :class:`ResumableLoader`."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.batches: Iterator[Any] | None = None
        self.start: dict[str, Any] = {}
        self.given = 0
        self.position: dict[str, Any] = {}
        self.data = generators_of(getattr(loader.inner, "dataset", loader.inner))
        self.states = DatasetStates(without_fabric(loader.inner)) if loader._keeps_position else None
        self.ahead: list[dict[str, Any]] = []  # random states of batches that were prefetched before the checkpoint

    def begin(self) -> None:
        loader = self.loader
        state, loader._to_resume, loader._lazy = loader._to_resume, None, False
        if state is not None:
            self._resume(state)
            return
        self.start = {
            "random": random_state(),
            "generators": generator_states(loader.inner),
            "workers": loader._workers_seed,
            "calls": passes_of(loader.inner),
            "first": None,
        }
        self.batches = loader._begin(self.start, 0, self.states, known=False)
        self._note()

    def _begin_waiting(self) -> None:
        """Begin all passes that wait, as they draw their seeds one after the other, before any draws its order."""
        waiting, self.loader.waiting[:] = list(self.loader.waiting), []
        for each in (*waiting, self):
            if each.batches is None:
                each.begin()

    def _resume(self, state: dict[str, Any]) -> None:
        loader = self.loader
        self.start, self.given = dict(state["start"]), state["given"]
        # Resuming must not move the random state that training draws from: it is restored below.
        here = random_state()
        set_random_state(self.start["random"])
        restore_generators(generators_of(loader.inner), self.start["generators"])
        set_passes_of(loader.inner, self.start["calls"])
        saved = state.get("dataset")  # of None, the batches are read again
        if self.states is not None:
            self.states = DatasetStates(self.states.loader, saved)
        self.batches = loader._begin(self.start, self.given, self.states, known=saved is not None)
        # Batches that were skipped by their indices drew nothing from the dataset's generators.
        restore_generators(self.data, state["data"])
        set_random_state(here)
        self.ahead = list(state["random"])
        self._note()

    def __next__(self) -> Any:
        if self.batches is None:
            self._begin_waiting()
        assert self.batches is not None
        here = None
        if self.ahead:
            # The uninterrupted run fetched this batch earlier, in the state of that moment.
            here = random_state()
            set_random_state(self.ahead.pop(0))
        before = self._before_fetching() if self.loader._in_process else None
        try:
            batch = next(self.batches)
            if self.states is not None:
                batch = self.states.take(batch)
        except StopIteration:
            self.position["ended"] = True  # the same dictionary is in _positions
            self.loader._repeats += 1
            raise
        finally:
            if here is not None:
                set_random_state(here)
        # Draws with the first batch are repeated from `first`. Later draws are mixed with those of training.
        if self.loader._watched and self.given > 0 and here is None:
            self.loader._watched = False
            _warn_if_moved(before)
        self.given += 1
        self.loader._handed_out += 1
        self._note()
        return batch

    def _before_fetching(self) -> dict[str, Any]:
        """Record the random state: samplers draw from it with their first index, datasets with every sample."""
        before = random_state()
        if self.given == 0:
            self.start["first"] = before
        self.position["random"] = before
        return before

    def _note(self) -> None:
        self.position = {
            "start": self.start,
            "given": self.given,
            "ended": False,
            "repeats": self.loader._repeats,
            "random": None,
            "data": list(map(generator_state, self.data)),
            "dataset": self.states and self.states.position(),
        }
        # By reference: `random` and `ended` are filled in when the next batch is requested.
        self.loader._positions.append((self.loader._handed_out, self.position))


def _warn_if_moved(before: dict[str, Any] | None) -> None:
    if before is not None and not torch.equal(before["torch"], torch.get_rng_state()):
        why = "training draws from the same generator, so a resumed run would read other samples"
        way_out = "Give the dataset its own torch.Generator as an attribute, or use num_workers=1"
        warn(explain("this IterableDataset draws from torch's global generator while it is read", why, way_out))
