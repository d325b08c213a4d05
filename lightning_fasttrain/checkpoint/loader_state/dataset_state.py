"""Datasets that keep their position, and samples that are seeded: an epoch resumes without reading again."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_fasttrain.checkpoint.loader_state.attributes import Attributes, is_generator
from lightning_fasttrain.core.files import refuse_unreadable
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.rng import SeededSamples, random_state, set_random_state


def keeps_position(dataset: object) -> bool:
    """Whether a dataset has ``state_dict()`` and ``load_state_dict(state)``, which take no other arguments.

    Example:
        >>> keeps_position([1, 2, 3])
        False
    """
    methods = (getattr(dataset, "state_dict", None), 0), (getattr(dataset, "load_state_dict", None), 1)
    return all(callable(method) and _accepts(method, count) for method, count in methods)


def _accepts(method: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


class OwnState:
    """Reads the states of a dataset or loader, unless the first one could not be loaded again.

    Attributes:
        why: why they could not be loaded; None if they can.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._is_checked = False

    def read(self, holder: Any) -> Any:
        """Return a copy of ``holder.state_dict()``, which ``holder`` may change later; None if it is of no use."""
        if self.why is not None:
            return None
        try:
            state = copy.deepcopy(holder.state_dict())
            if not self._is_checked:
                refuse_unreadable({"state_dict": state})
        except (ValueError, TypeError) as error:
            self.why = str(error)
            return None
        self._is_checked = True
        return state


def other_workers(loader: DataLoader[Any], saved: int) -> ValueError:
    """Return the error for a loader with another number of workers than the saved one."""
    what = f"num_workers={loader.num_workers} for a checkpoint with num_workers={saved}"
    why = f"each worker has its own position in {type(loader.dataset).__name__}"
    return ValueError(explain(what, why, f"Use num_workers={saved}"))


class DatasetStates:
    """States of the dataset of a loader after each batch of one pass.

    Workers return batches in turn. A new pass begins with the first worker, so the states of all workers are those
    before the current turn, and the batches of this turn are read again: fewer than there are workers.

    Args:
        loader: its dataset keeps its position.
        saved: what :meth:`position` returned; the pass then resumes there.

    Raises:
        ValueError: it was saved with another number of workers.
    """

    def __init__(self, loader: DataLoader[Any], saved: dict[str, Any] | None = None) -> None:
        if saved is not None and saved["workers"] != loader.num_workers:
            raise other_workers(loader, saved["workers"])
        self.loader = loader
        self.in_process = loader.num_workers == 0
        self.by_index = not isinstance(loader.dataset, IterableDataset)
        self.again = 0
        self._before: dict[int, Any] = {}
        if saved is not None:
            self.again, self._before = saved["again"], dict(saved["states"])
        self._now = dict(self._before)
        self._turn: list[int] = []  # workers that have returned a batch in the current turn
        self._readable = True
        self._own = OwnState()

    def position(self) -> dict[str, Any] | None:
        """Return the state from which a new pass resumes; None if the dataset's state cannot be saved."""
        if not self._readable:
            return None
        workers = self.loader.num_workers
        return {"workers": workers, "states": list(self._before.items()), "again": len(self._turn)}

    @contextmanager
    def restored(self, given: int) -> Iterator[None]:
        """Let a pass that is begun inside the context resume after ``given`` batches, less the :attr:`again` ones."""
        with ExitStack() as undo:
            if self.in_process:
                for state in self._before.values():
                    self.loader.dataset.load_state_dict(copy.deepcopy(state))  # pyright: ignore
            else:
                init, collate = self.loader.worker_init_fn, self.loader.collate_fn
                undo.callback(patch(self.loader, "worker_init_fn", _RestoringInit(init, self._before)))
                undo.callback(patch(self.loader, "collate_fn", _TaggingCollate(collate)))
                if self.by_index and given:
                    undo.enter_context(skip_indices(self.loader, given - self.again))
            yield

    def take(self, batch: Any) -> Any:
        """Note the state after a batch that the loader returned, and return the batch itself."""
        if self.in_process:
            self._before[0] = self._own.read(self.loader.dataset)
            why = self._own.why
        else:
            batch, worker, state, why = batch
            if self._turn and worker <= self._turn[-1]:
                self._before, self._turn = dict(self._now), []
            self._turn.append(worker)
            self._now[worker] = state
        if why is not None and self._readable:
            self._readable = False
            what = f"the state_dict of {type(self.loader.dataset).__name__} is not used"
            warn(explain(what, why, "Return tensors and plain values; otherwise a resumed run reads batches again"))
        return batch


class _TaggedBatch(NamedTuple):
    batch: Any
    worker: int
    state: dict[str, Any]
    why_unreadable: str | None


class _TaggingCollate:
    """A ``collate_fn`` that adds the state of the worker to each batch."""

    def __init__(self, inner: Callable[[Any], object]) -> None:
        self.inner, self.own = inner, OwnState()
        self.generators: Attributes | None = None  # until the worker has its dataset

    def __call__(self, samples: object) -> _TaggedBatch:
        batch = self.inner(samples)
        worker = get_worker_info()
        assert worker is not None
        dataset: Any = worker.dataset
        if self.generators is None:
            self.generators = Attributes([dataset], only_generators=True)
        own = self.own.read(dataset)
        state = {"own": own, "random": random_state(), "generators": self.generators.changes()}
        return _TaggedBatch(batch, worker.id, state, self.own.why)


class _RestoringInit:
    """A ``worker_init_fn`` that restores the state of the worker."""

    def __init__(self, inner: Callable[[int], None] | None, states: dict[int, Any]) -> None:
        self.inner, self.states = inner, states

    def __call__(self, worker_id: int) -> None:
        if self.inner is not None:
            self.inner(worker_id)
        if worker_id not in self.states:
            return
        worker, state = get_worker_info(), self.states[worker_id]
        assert worker is not None
        dataset: Any = worker.dataset
        dataset.load_state_dict(state["own"])
        Attributes([dataset], only_generators=True).restore(state["generators"])
        set_random_state(state["random"])


def refuse_unseedable(loader: object) -> None:
    """Refuse a loader whose samples depend on more than their index and the global generators.

    Raises:
        ValueError: not a DataLoader of a map-style dataset, or the dataset has generators of its own.
    """
    what, way_out = f"seed_samples=True with {type(loader).__name__}", "Use seed_samples=False for this loader"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(explain(what, "only a DataLoader of a map-style dataset reads samples by index", way_out))
    if Attributes([loader.dataset], only_generators=True).changes():
        what = f"seed_samples=True with {type(loader.dataset).__name__}"
        why = "the dataset has generators of its own, whose states in the workers depend on the samples before"
        raise ValueError(explain(what, why, "Draw from the generators of torch, Python and NumPy instead"))


class SharedSeed:
    """A seed that workers see when it is set for the next pass."""

    def __init__(self) -> None:
        self.memory = torch.zeros(64, dtype=torch.uint8)

    def set(self, seed: str) -> None:
        """Set the 64 characters that :func:`seed_of_pass` returned."""
        if not self.memory.is_shared():
            self.memory.share_memory_()
        self.memory.copy_(torch.frombuffer(bytearray(seed.encode()), dtype=torch.uint8))

    def __str__(self) -> str:
        return self.memory.numpy().tobytes().decode()


def seed_of_pass(start: Mapping[str, Any]) -> str:
    """Return a seed that follows from the random states at the start of a pass over the data."""
    digest = hashlib.sha256()
    generators = [value for _, value in sorted(start["attributes"].items()) if is_generator(value)]
    for state in (start["random"]["torch"], *(value[2] for value in generators)):
        digest.update(state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode())
    return digest.hexdigest()


@contextmanager
def seeded_rest(loader: DataLoader[object], seed: str | SharedSeed, skipped: int) -> Iterator[None]:
    """Let a pass that is begun inside the context read seeded samples, without the first ``skipped`` batches."""
    # An iterator reads it when it is created. torch forbids setting it, hence vars().
    place, dataset = vars(loader), loader.dataset
    place["dataset"] = SeededSamples(dataset, seed)
    try:
        with skip_indices(loader, skipped):
            yield
    finally:
        place["dataset"] = dataset


@contextmanager
def skip_indices(loader: DataLoader[object], skipped: int) -> Iterator[None]:
    """Let a pass that is begun inside the context start after the indices of the first ``skipped`` batches."""
    place, indices = vars(loader), "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = place[indices]
    if skipped:
        place[indices] = _Rest(sampler, skipped)
    try:
        yield
    finally:
        place[indices] = sampler


class _Rest:
    """The entries of a sampler after the first ones, which are drawn and dropped, in the first pass over it."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self.inner, self.skipped = inner, skipped

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader makes two iterators, of which it reads the second.
        skipped, self.skipped = self.skipped, 0
        yield from islice(self.inner, skipped, None)

    def __len__(self) -> int:
        return len(self.inner) - self.skipped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
