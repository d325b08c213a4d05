"""A loader that can be stopped at any batch and resumed, in another process, at the next one."""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_fasttrain.checkpoint.loader_state.attributes import are_equal, is_left_out, watch_attributes
from lightning_fasttrain.checkpoint.loader_state.dataset_state import (
    DatasetStates,
    OwnState,
    PersistentWorkers,
    SharedSeed,
    find_persistent_workers,
    keeps_position,
    other_workers,
    refuse_unseedable,
    seed_of_pass,
    seeded_rest,
    stop_workers,
)
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.host.lightning import passes_of, set_passes_of, without_fabric
from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader
from lightning_fasttrain.core.messages import explain, list_some, say, warn
from lightning_fasttrain.core.modules.select import class_if_imported
from lightning_fasttrain.core.state.rng import random_state, set_random_state

_MOST_ENTRIES = 1024  # of a tensor or container that a checksum reads
_MOST_PARTS = 10_000  # of a batch that a checksum reads
_REMEMBERED = 6  # positions: more than anything between the loader and the training step prefetches


@check_arguments
def resumable(
    loader: Iterable[object], seed_samples: bool = False, on_change: Literal["error", "warn"] = "error"
) -> Any:
    """Wrap a loader so that it has ``state_dict`` and ``load_state_dict``, and resumes at its position.

    The contents of a batch follow from the state at the beginning of the pass over the data. This state is saved with
    the number of batches returned; after ``load_state_dict`` the next pass begins there and skips that many batches: by
    their indices alone if a map-style dataset is read in this process, or with ``seed_samples``; by the position that
    the dataset itself keeps, here or in each worker, if it has ``state_dict`` and ``load_state_dict``; otherwise by
    reading them again, which takes time and is logged. Afterwards the previous random state is restored.

    The state consists of the generators of torch, Python and NumPy and of the attributes of the dataset and samplers,
    and of objects in them, that have changed since they were made: own generators, epochs, counters. Persistent
    workers report theirs. Open files, large caches and other values that are not plain are left out, and named when
    they have changed. An ``IterableDataset`` that is read in this process and draws from the global generators shares
    them with training and cannot be replayed: give it its own generator. For torch's generator there is a warning.

    A checksum of the last batch is saved, too, and of the next one if it was prefetched. On resuming they are compared
    with what is read, on the rank that saved them.

    Args:
        loader: a ``DataLoader``, the result of ``fabric.setup_dataloaders``, or any object that can be iterated
            repeatedly. Its attributes are forwarded.
        seed_samples: seed the global generators for each sample, by the pass and the sample's index. Samples then
            depend neither on the worker nor on those read before, so that resuming with workers reads nothing again,
            and may have another number of workers. Random augmentations draw other numbers than without it.
        on_change: whether batches that differ from the saved run's are an error or a warning.

    Returns:
        The wrapped loader, which is iterated over as before; ``loader`` itself if it has ``state_dict`` already.

    Raises:
        TypeError: ``loader`` is an iterator, which ends with its first pass.
        ValueError: ``persistent_workers`` under Fabric; ``seed_samples`` where the loader is not a ``DataLoader`` of a
            map-style dataset, or the dataset has generators of its own; on iterating: the state is of another kind of
            loader, or the data have changed.

    Example:
        A loop that resumes from its checkpoint, bit for bit:

        >>> from lightning_fasttrain.checkpoint import random_state, set_random_state
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
    return ResumableLoader(loader, seed_samples, on_change)


def is_stateful(loader: object) -> bool:
    """Whether it is torchdata's ``StatefulDataLoader``."""
    return isinstance(loader, class_if_imported("torchdata.stateful_dataloader", "StatefulDataLoader"))


class ResumableLoader(WrappedLoader):
    """The wrapper that :func:`resumable` returns."""

    # Whether, after a load, a pass begins with its first batch, since Lightning may iterate again before.
    _begins_late = False

    def __init__(self, inner: Iterable[Any], seed_samples: bool = False, on_change: str = "error") -> None:
        if isinstance(inner, Iterator):
            why = "an iterator ends with its first pass, so a later process cannot skip to its position"
            way_out = "Pass a DataLoader, or an object whose __iter__ starts over"
            raise TypeError(explain(f"loader={type(inner).__name__}", why, way_out))
        super().__init__(inner)
        loader: Any = without_fabric(inner)
        torchs = isinstance(loader, DataLoader)
        if torchs and loader.persistent_workers and loader is not inner:
            why = "their states at the beginning of a pass are not known, since Fabric starts them with the first batch"
            raise ValueError(explain("persistent_workers=True under Fabric", why, "Use persistent_workers=False"))
        if seed_samples:
            refuse_unseedable(loader)
        self._on_change = on_change
        self._seeds, self._shared_seed = seed_samples, SharedSeed()
        self._persistent = torchs and loader.persistent_workers and not is_stateful(loader)
        self._in_process = not torchs or loader.num_workers == 0
        streams = torchs and isinstance(loader.dataset, IterableDataset)
        # torchdata starts a worker again whose stream had ended before the others.
        self._is_stateful = is_stateful(loader) and not seed_samples and (self._in_process or not streams)
        dataset_keeps = torchs and not seed_samples and keeps_position(loader.dataset)
        self._keeps_position = dataset_keeps and not self._is_stateful
        self._own = dataset_keeps and self._in_process
        self._own_state, self._loader_state = OwnState(), OwnState()
        # Of other loaders it is not asked, since torch then compares it with what is read.
        self._has_length = not self._is_stateful or sized_len(loader) is not None
        self._watched = self._in_process and streams and not self._keeps_position
        self._attributes = watch_attributes(loader, without_dataset=self._own)
        self._handed_out = self._repeats = 0
        self._positions: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_REMEMBERED)
        self._to_resume: dict[str, Any] | None = None
        self._lazy = False
        self._later: list[Any] = []  # random states in which the next pass began, and its batches were prefetched
        # Passes that start with the first batch: of this loader, or of all that are read side by side.
        self.waiting: list[_Pass] = []
        self._saved_workers: dict[str, Any] | None = None  # in which persistent workers start

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
        return {**self.position(self._handed_out), "random": [], "later": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; call it before iterating."""
        self._positions.clear()
        self._handed_out = 0
        self._lazy = self._begins_late
        self._to_resume, self._later = None, []
        if self._persistent:
            stop_workers(without_fabric(self.inner))
        if state["start"] is None:
            self._restore(state)
            self._repeats = 0
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
        running = find_persistent_workers(without_fabric(self.inner)) if self._persistent else None
        workers = self._saved_workers if running is None else running.between_passes()
        return {**self._now(), "start": None, "workers": workers}

    def _now(self) -> dict[str, Any]:
        loader = without_fabric(self.inner)
        return {
            "calls": passes_of(self.inner),
            "attributes": self._attributes.changes(),
            "own": self._own_state.read(loader.dataset) if self._own else None,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Put everything back that the order of the next pass depends on."""
        self._restore_attributes(state["attributes"])
        if state["own"] is not None:
            without_fabric(self.inner).dataset.load_state_dict(state["own"])
        set_passes_of(self.inner, state["calls"])
        self._saved_workers = state["workers"]

    def _restore_attributes(self, changes: dict[str, Any]) -> None:
        self._attributes.restore(changes, strict=self._on_change == "error")

    def position(self, used: int) -> dict[str, Any]:
        """Return the state after ``used`` batches since :meth:`count_from`, regardless of prefetched batches."""
        if not self._positions:  # no batch was requested yet
            # A state that was loaded, and whose pass has not begun, still holds.
            return self._to_resume or self.between_passes()
        ahead: list[Any] = []  # the random states in which batches were prefetched
        following = None
        for handed_out, position in reversed(self._positions):
            if position["random"] is not None:
                ahead.insert(0, (position["start"], position["random"]))
            if handed_out <= used:
                start = position["start"]
                random = [random for its_start, random in ahead if its_start is start]
                later = [(its_start["random"], random) for its_start, random in ahead if its_start is not start]
                is_next = following is not None and following["start"] is start
                expected = following["checksum"] if following is not None and is_next else None
                return {**position, **self._complete(position), "random": random, "later": later, "next": expected}
            following = position
        raise RuntimeError(f"{self._handed_out} batches were fetched and {used} used: too many are prefetched.")

    def _complete(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return the state at a position, with what was set since by others than the loader, such as hooks."""
        now, last = self._attributes.changes(), self._positions[-1][1]
        if position is last and not position["ended"]:
            return {"attributes": now, "loader": self._read_loader()}
        # The resumed run will ask for further batches again, or find again that there are none.
        asked = last["attributes_at_end"] if last["ended"] else last["attributes"]
        set_since = {key: value for key, value in now.items() if not are_equal(value, asked.get(key))}
        return {"attributes": {**position["attributes"], **set_since}}

    def _read_loader(self) -> Any:
        return self._loader_state.read(without_fabric(self.inner)) if self._is_stateful else None

    def count_from(self, used: int) -> None:
        """Set the number of batches returned so far, for :meth:`position`."""
        self._handed_out, self._repeats = used, 0 if used == 0 else self._repeats

    def _begin(
        self, start: dict[str, Any], given: int, states: DatasetStates | None, known: bool, own: Any = None
    ) -> Iterator[Any]:
        """Begin the pass that ``start`` describes, so that at most ``given`` batches are left to skip.

        Args:
            start: state at the beginning of the pass.
            given: number of batches before the position.
            states: those of the dataset, if it keeps its position.
            known: whether they are at ``given``.
            own: what a loader that keeps its position itself is to load.
        """
        loader: Any = without_fabric(self.inner)
        self._skipped = 0
        if own is not None:
            loader.load_state_dict(own)
            self._skipped = given
        with ExitStack() as during:
            running = self._enter_workers(start, during) if self._persistent else None
            if states is not None:
                during.enter_context(states.restored(given if known else 0))
                if known and not (self._in_process and states.by_index):
                    self._skipped = given - states.again
            elif self._seeds:
                # The last batch is read again, and compared; without workers, indices are drawn with the first batch.
                self._skipped = 0 if self._in_process else max(given - 1, 0)
                seed: Any = seed_of_pass(start)
                if self._persistent:
                    self._shared_seed.set(seed)
                    seed = self._shared_seed
                during.enter_context(seeded_rest(loader, seed, self._skipped))
            batches = iter(self.inner)
        if running is not None:
            start["workers"] = running.at_start()
        return batches

    def _enter_workers(self, start: dict[str, Any], during: ExitStack) -> PersistentWorkers:
        loader: Any = without_fabric(self.inner)
        running = find_persistent_workers(loader)
        if running is not None:
            running.passes += 1
            return running
        saved, self._saved_workers = start["workers"], None
        if saved is not None and len(saved["states"]) != loader.num_workers:
            if not self._seeds:
                raise other_workers(loader, len(saved["states"]))
            saved = None
        running = PersistentWorkers(loader, saved)
        during.enter_context(running.starting())
        return running

    def _skip(self, batches: Iterator[Any], state: dict[str, Any], states: DatasetStates | None) -> list[Any]:
        """Skip to the saved position; return the last batch before it, or nothing if it was not read."""
        left = state["given"] - self._skipped
        if left <= 0:
            return []
        by_index = isinstance(batches, _SingleProcessDataLoaderIter) and not isinstance(self.dataset, IterableDataset)
        if by_index:
            # Only indices are consumed, so no sample is loaded but those of the last batch, which are compared.
            read = 0 if self._keeps_position else 1
            for _ in islice(batches._sampler_iter, left - read):  # pyright: ignore[reportAttributeAccessIssue]
                pass
            left = read
        elif left > 1:
            say("Resuming: reading and dropping %d batches, to reach the saved position", left)
        for batch in islice(batches, max(left - 1, 0)):
            if states is not None:
                states.take(batch)
        if self._in_process and left and state["before"] is not None:
            # Since the batches before it, training has drawn, and hooks may have set attributes.
            set_random_state(state["before"]["random"])
            self._restore_attributes(state["before"]["attributes"])
        last = list(islice(batches, min(left, 1)))
        return last if states is None else list(map(states.take, last))

    def _compare(self, batch: Any, saved: int | None, which: str) -> None:
        """Raise an error, or warn, if a batch differs from the one that the saved run read at this place."""
        if saved is None or checksum(batch) == saved:
            return
        what = f"the {which} differs from the one that the saved run has read"
        why = "the data or their order have changed, or samples depend on something that a checkpoint does not hold"
        way_out = 'Restore the data, or pass on_change="warn" to train on from here'
        if self._on_change == "error":
            raise ValueError(explain(what, why, way_out))
        warn(explain(what, why, "The run trains on what is read now"))


class _Pass(Iterator[Any]):
    """One pass over the data of a :class:`ResumableLoader`."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.batches: Iterator[Any] | None = None
        self.start: dict[str, Any] = {}
        self.given = 0
        self.position: dict[str, Any] = {}
        self.states = DatasetStates(without_fabric(loader.inner)) if loader._keeps_position else None
        self.ahead: list[dict[str, Any]] = []  # random states of batches that were prefetched before the checkpoint
        self.expected: int | None = None  # checksum of the next batch

    def begin(self) -> None:
        loader = self.loader
        state, loader._to_resume, loader._lazy = loader._to_resume, None, False
        if state is not None:
            self._resume(state)
            return
        later, loader._later, here = loader._later, [], None
        if later:
            # The uninterrupted run began this pass earlier, as it prefetched beyond the end of the last one.
            here = random_state()
            set_random_state(later[0][0])
            self.ahead = [random for _, random in later]
        self.start = {"random": random_state(), **loader._now(), "workers": loader._saved_workers, "first": None}
        self.batches = loader._begin(self.start, 0, self.states, known=False)
        if here is not None:
            set_random_state(here)
        self._note(None)

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
        loader._restore(self.start)
        saved = state.get("dataset")  # of None, the batches are read again
        if self.states is not None:
            self.states = DatasetStates(self.states.loader, saved)
        self.batches = loader._begin(self.start, self.given, self.states, saved is not None, state["loader"])
        first = self.start["first"]
        if self.given and first is not None:
            # Training draws between the start of a pass and its first fetch, which is when samplers draw.
            set_random_state(first["random"])
            loader._restore_attributes(first["attributes"])
        last = loader._skip(self.batches, state, self.states)
        # Batches that were skipped by their indices changed nothing in the dataset.
        loader._restore_attributes(state["attributes"])
        set_random_state(here)
        self.ahead, loader._later = list(state["random"]), list(state["later"])
        # Loops often save the state of one rank for all, which have other samples.
        if state["rank"] == [rank_here(), rank_count()]:
            self.expected = state["next"]
            for batch in last:
                loader._compare(batch, state["checksum"], "last batch before the saved position")
        left_out = [path.partition(".")[2] for path, value in state["attributes"].items() if is_left_out(value)]
        if left_out:
            what = f"{list_some(left_out)} of the data changed in the saved run, and the checkpoint does not hold it"
            why = "only plain values of limited size are saved"
            warn(explain(what, why, "If samples depend on it, give the dataset state_dict() and load_state_dict()"))
        self._note(state["checksum"], state["before"])

    def __next__(self) -> Any:
        if self.batches is None:
            self._begin_waiting()
        assert self.batches is not None
        here = None
        if self.ahead:
            # The uninterrupted run fetched this batch earlier, in the state of that moment.
            here = random_state()
            set_random_state(self.ahead.pop(0))
        before = self._before_fetching()
        try:
            batch = next(self.batches)
            if self.states is not None:
                batch = self.states.take(batch)
        except StopIteration:
            self.position["ended"] = True  # the same dictionary is in _positions
            self.position["attributes_at_end"] = self.loader._attributes.changes()
            self.loader._repeats += 1
            raise
        finally:
            if here is not None:
                set_random_state(here)
        # Draws with the first batch are repeated from `first`. Later draws are mixed with those of training.
        if self.loader._watched and self.given > 0 and here is None:
            self.loader._watched = False
            _warn_if_moved(before["random"])
        self.given += 1
        self.loader._handed_out += 1
        if self.expected is not None:
            self.loader._compare(batch, self.expected, "first batch after the saved position")
            self.expected = None
        self._note(checksum(batch), before)
        return batch

    def _before_fetching(self) -> dict[str, Any]:
        """Record the state: samplers draw random numbers with their first index, datasets with every sample."""
        self.position["attributes"] = self.loader._attributes.changes()
        if self.loader._is_stateful and not self.loader._has_length:
            self.position["loader"] = self.loader._read_loader()  # Lightning prefetches a batch
        # Workers draw from generators of their own.
        self.position["random"] = random_state() if self.loader._in_process else None
        before = {name: self.position[name] for name in ("random", "attributes")}
        if self.given == 0 and self.loader._in_process:
            self.start["first"] = before
        return before

    def _note(self, last: int | None, before: dict[str, Any] | None = None) -> None:
        self.position = {
            "start": self.start,
            "given": self.given,
            "ended": False,
            "attributes_at_end": None,
            "repeats": self.loader._repeats,
            "random": None,
            "dataset": self.states and self.states.position(),
            "attributes": self.loader._attributes.changes(),
            "loader": None,
            "rank": [rank_here(), rank_count()],
            "checksum": last,
            "before": before if self.loader._in_process else None,
        }
        # By reference: what is known when the next batch is requested is filled in then.
        self.loader._positions.append((self.loader._handed_out, self.position))


def _warn_if_moved(before: dict[str, Any] | None) -> None:
    if before is not None and not torch.equal(before["torch"], torch.get_rng_state()):
        why = "training draws from the same generator, so a resumed run would read other samples"
        way_out = "Give the dataset its own torch.Generator as an attribute, or use num_workers=1"
        warn(explain("this IterableDataset draws from torch's global generator while it is read", why, way_out))


def checksum(batch: object) -> int:
    """Return a number that follows from the contents of a batch: up to 1,024 entries of each tensor, spread over it.

    Of a tensor that is not on the CPU only shape and dtype count, so that nothing waits for a device.

    Example:
        >>> batch = {"ids": torch.arange(6), "names": ["a", "b"]}
        >>> checksum(batch) == checksum({"ids": torch.arange(6), "names": ["a", "b"]})
        True
        >>> checksum(batch) == checksum({"ids": torch.arange(6).flip(0), "names": ["a", "b"]})
        False
    """
    number, waiting, seen = 0, [batch], dict[int, object]()
    while waiting and len(seen) < _MOST_PARTS:
        value = waiting.pop()
        number = zlib.crc32(_read_bytes(value), number)
        if id(value) not in seen:  # objects may hold each other
            seen[id(value)] = value
            waiting.extend(_parts(value))
    return number


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | np.ndarray):
        return ()
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()][:_MOST_ENTRIES]
    if isinstance(value, list | tuple):
        return value[:_MOST_ENTRIES]
    return list(getattr(value, "__dict__", {}).values())


def _read_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value) if value.flags.writeable else torch.from_numpy(value.copy())
    if not isinstance(value, Tensor):
        is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        return repr(value).encode() if is_plain else type(value).__name__.encode()
    kind = f"{value.dtype} {tuple(value.shape)}".encode()
    is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    if value.device.type != "cpu" or value.numel() == 0 or not is_plain:
        return kind
    # An odd step does not fall on the same column of each row.
    some = value.detach().reshape(-1)[:: (value.numel() // _MOST_ENTRIES) | 1].resolve_conj().contiguous()
    return kind + some.view(torch.uint8).numpy().tobytes()
