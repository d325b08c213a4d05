"""State of datasets, samplers and generators of a loader, so that a resumed epoch continues with its next batch."""

import copy
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from lightning_fasttrain.core.files.safe_load import refuse_unreadable
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
            what = f"num_workers={loader.num_workers} for a checkpoint with num_workers={saved['workers']}"
            why = f"each worker has its own position in {type(loader.dataset).__name__}"
            raise ValueError(explain(what, why, f"Use num_workers={saved['workers']}"))
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
        self._own = _OwnState()

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
            # The state that the dataset returns may be the one that it changes.
            self._before[0] = self._own.read(lambda: copy.deepcopy(self.loader.dataset.state_dict()))  # pyright: ignore
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


class _OwnState:
    """Reads the state of a dataset, unless it is found at the first time that it could not be loaded again."""

    def __init__(self) -> None:
        self.checked, self.why = False, None

    def read(self, state_of: Callable[[], object]) -> Any:
        if self.why is not None:
            return None
        try:
            state = state_of()
            if not self.checked:
                refuse_unreadable({"state_dict": state})
        except (ValueError, TypeError) as error:
            self.why = str(error)
            return None
        self.checked = True
        return state


class _TaggedBatch(NamedTuple):
    batch: Any
    worker: int
    state: dict[str, Any]
    why_unreadable: str | None


class _TaggingCollate:
    """A ``collate_fn`` that adds the state of the worker to each batch."""

    def __init__(self, inner: Callable[[Any], object]) -> None:
        self.inner, self.own = inner, _OwnState()

    def __call__(self, samples: object) -> _TaggedBatch:
        batch = self.inner(samples)
        worker = get_worker_info()
        assert worker is not None
        dataset: Any = worker.dataset
        generators = generator_states(dataset)
        own = self.own.read(dataset.state_dict)
        state = {"own": own, "random": random_state(), "generators": generators}
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
        for generator, its_state in zip(generators_of(dataset), state["generators"], strict=False):
            set_generator_state(generator, its_state)
        set_random_state(state["random"])


def refuse_unseedable(loader: object) -> None:
    """Refuse a loader whose samples depend on more than their index and the global generators.

    Raises:
        ValueError: not a DataLoader of a map-style dataset, or the dataset has generators of its own.
    """
    what, way_out = f"seed_samples=True with {type(loader).__name__}", "Use seed_samples=False for this loader"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(explain(what, "only a DataLoader of a map-style dataset reads samples by index", way_out))
    if generators_of(loader.dataset):
        what = f"seed_samples=True with {type(loader.dataset).__name__}"
        why = "the dataset has generators of its own, whose states in the workers depend on the samples before"
        raise ValueError(explain(what, why, "Draw from the generators of torch, Python and NumPy instead"))


def seed_of_pass(start: Mapping[str, Any]) -> str:
    """Return a seed that follows from the random states at the start of a pass over the data."""
    digest = hashlib.sha256()
    for state in (start["random"]["torch"], *start["generators"]):
        digest.update(state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode())
    return digest.hexdigest()


@contextmanager
def seeded_rest(loader: DataLoader[object], seed: str, skipped: int) -> Iterator[None]:
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
    """The entries of a sampler after the first ones, which are drawn and dropped."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self.inner, self.skipped = inner, skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.inner), self.skipped, None)

    def __len__(self) -> int:
        return len(self.inner) - self.skipped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState | DistributedSampler
# `inner` is the attribute of our own wrapper, `_sampler` that of Lightning's wrapper for distributed sampling.
_HOLDERS = ("inner", "sampler", "batch_sampler", "_sampler", "base_sampler", "dataset", "data_source")
_DEPTH = 5


def generators_of(*holders: object) -> list[Generator]:
    """Return the generators of these objects and of the samplers and datasets inside them, each once, in a fixed order.

    Example:
        >>> data = torch.utils.data.DataLoader(range(4), shuffle=True, generator=torch.Generator())
        >>> generators_of(data) == [data.generator]
        True
    """
    found: dict[int, Generator] = {}
    for holder in holders:
        _look(holder, found, set(), _DEPTH)
    return list(found.values())


def _look(holder: object, found: dict[int, Generator], seen: set[int], depth: int) -> None:
    if depth == 0 or id(holder) in seen or not hasattr(holder, "__dict__"):
        return
    seen.add(id(holder))
    if isinstance(holder, DistributedSampler):
        # A sampler that draws each epoch's order from its own seed acts as a generator.
        found.setdefault(id(holder), holder)
    for name, value in vars(holder).items():
        if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            found.setdefault(id(value), value)
        # Only known names are followed: a dataset may hold anything, such as a model that has generators of its own.
        elif name in _HOLDERS:
            _look(value, found, seen, depth - 1)


def generator_states(*holders: object) -> list[Any]:
    """Return the states of the generators of these objects, in the order of :func:`generators_of`."""
    return list(map(generator_state, generators_of(*holders)))


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator as a tensor, or as plain numbers, lists and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, DistributedSampler):
        return generator.seed
    if isinstance(generator, np.random.Generator):
        # weights_only=True cannot read NumPy arrays, which some of these states hold.
        return _to_plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _to_plain(generator.get_state(legacy=False))
    return generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Restore the state that :func:`generator_state` returned.

    Example:
        >>> for generator in (torch.Generator(), random.Random(3), np.random.default_rng(3), np.random.RandomState(3)):
        ...     state = generator_state(generator)
        ...     draw = lambda: torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else (
        ...         generator.random())
        ...     first = draw()
        ...     set_generator_state(generator, state)
        ...     assert first == draw()
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, DistributedSampler):
        generator.seed = state
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))  # setstate accepts only a tuple


def restore_generators(generators: list[Generator], states: list[Any]) -> None:
    """Restore the states of generators, of which there must be as many.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(generators) != len(states):
        what = f"expected {len(generators)} generator states for a loader, got {len(states)} from the checkpoint"
        why = "the loader, its sampler or its dataset has changed"
        raise ValueError(explain(what, why, "Make the loader as in the saved run"))
    for generator, state in zip(generators, states, strict=True):
        set_generator_state(generator, state)


def _to_plain(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
