"""The position that a dataset keeps by itself, in this process or in each worker, so that no sample is read again."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_fasttrain.core.files.safe_load import refuse_unreadable
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.run.checkpoint.loaders.loader_rng import generator_states, generators_of, set_generator_state
from lightning_fasttrain.run.checkpoint.loaders.seeded_passes import skip_indices


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
