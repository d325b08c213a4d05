"""States that datasets and persistent workers hold beside their position, saved and restored."""

import copy
import hashlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from lightning_fasttrain.checkpoint.loader_state.attributes import Attributes, is_generator, watch_attributes
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch, patched
from lightning_fasttrain.core.safe_load import refuse_unreadable
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


_PATIENCE_S = 60.0  # for batches that a worker still reads
_DATASET = "0"  # its place among the objects of a loader


class PersistentWorkers:
    """The persistent workers of a loader, whose states between and within passes are known.

    Args:
        loader: has persistent workers, which do not run yet.
        saved: what :meth:`between_passes` or :meth:`at_start` returned; None for the first pass of a run.

    Attributes:
        passes: number of passes begun, less one.
    """

    def __init__(self, loader: DataLoader[Any], saved: dict[str, Any] | None) -> None:
        self.loader, self.passes = loader, 0
        self._saved = saved
        # A DataLoader seeds its workers when it makes its iterator, and draws the seed from this generator.
        drawn_from = torch.get_rng_state() if loader.generator is None else loader.generator.get_state()
        self._seed = drawn_from if saved is None else saved["seed"]
        self._questions: list[Any] = []
        self._asked = 0
        self._queues: list[_CountingQueue] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context in which the loader starts the workers."""
        loader, saved = self.loader, self._saved
        context = loader.multiprocessing_context or torch.multiprocessing
        pipes = [context.Pipe() for _ in range(loader.num_workers)]
        all_began = watch_attributes(loader).began
        began = {path: value for path, value in all_began.items() if path.partition(".")[0] == _DATASET}
        states = None if saved is None else saved["states"]
        init = _AnsweringInit(loader.worker_init_fn, [pipe[1] for pipe in pipes], began, states)
        generator = loader.generator
        if saved is not None:
            generator = torch.Generator()
            generator.set_state(self._seed)
        with patched(loader, "worker_init_fn", init), patched(loader, "generator", generator):
            yield
        for _, answers in pipes:
            answers.close()  # the worker has its own
        self._questions = [questions for questions, _ in pipes]
        running: Any = loader._iterator
        first = [info[0] for info in running._task_info.values()]
        self._queues = [_CountingQueue(queue, first.count(i)) for i, queue in enumerate(running._index_queues)]
        running._index_queues = self._queues
        _known[running] = self

    def at_start(self) -> dict[str, Any] | None:
        """Return the state in which workers began this pass; None for the first pass of a run."""
        if self.passes == 0:
            return self._saved
        return self._ask(lambda answer, queue: True, lambda answer: answer.at_start)

    def between_passes(self) -> dict[str, Any] | None:
        """Return the state in which workers will begin the next pass, once they have read what was asked of them."""

        def is_idle(answer: _Answer, queue: _CountingQueue) -> bool:
            return answer.has_ended or answer.read >= queue.sent

        return self._ask(is_idle, lambda answer: answer.now)

    def _ask(
        self, is_ready: Callable[["_Answer", "_CountingQueue"], bool], choose: Callable[["_Answer"], dict[str, Any]]
    ) -> dict[str, Any] | None:
        states, until = [], time.monotonic() + _PATIENCE_S
        for questions, queue in zip(self._questions, self._queues, strict=True):
            answer = self._ask_one(questions, until)
            while answer is not None and (answer.passes < self.passes or not is_ready(answer, queue)):
                time.sleep(0.001)
                answer = self._ask_one(questions, until)
            if answer is None:
                what = "the state of persistent workers is not saved"
                why = f"one has not answered in {_PATIENCE_S:g} s"
                warn(explain(what, why, "A run resumed from this checkpoint starts them anew"))
                return None
            states.append(choose(answer))
        return {"seed": self._seed, "states": states}

    def _ask_one(self, questions: Any, until: float) -> "_Answer | None":
        self._asked += 1
        try:
            questions.send(self._asked)
            while questions.poll(until - time.monotonic()):
                number, answer = questions.recv()
                if number == self._asked:  # not one that came too late
                    return answer
        except (OSError, EOFError):  # the worker has ended
            pass
        return None


_known: WeakKeyDictionary[Any, PersistentWorkers] = WeakKeyDictionary()  # the loader's iterator → its workers


def find_persistent_workers(loader: DataLoader[Any]) -> PersistentWorkers | None:
    """Return the running workers of a loader; None if none run. Workers that started unobserved are shut down."""
    running: Any = loader._iterator
    if running is None:
        return None
    if running not in _known:
        note_once("ExactResume: persistent workers that ran before are restarted once, so that their state is known")
        stop_workers(loader)
    return _known.get(running)


def stop_workers(loader: DataLoader[Any]) -> None:
    """Shut persistent workers down, so that the next pass starts new ones."""
    running: Any = loader._iterator
    if running is not None:
        running._shutdown_workers()
        loader._iterator = None


class _CountingQueue:
    """Counts the batches that a worker is to read in this pass."""

    def __init__(self, inner: Any, sent: int) -> None:
        self.inner, self.sent = inner, sent

    def put(self, task: object) -> None:
        # Other tasks are a new pass and the end.
        self.sent = self.sent + 1 if isinstance(task, tuple) else 0
        self.inner.put(task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Answer(NamedTuple):
    passes: int  # that the worker has begun, less one
    read: int  # batches in this pass
    has_ended: bool
    at_start: dict[str, Any]
    now: dict[str, Any]


class _AnsweringInit:
    """A ``worker_init_fn`` after which the worker answers."""

    def __init__(
        self,
        inner: Callable[[int], None] | None,
        answers: Sequence[Any],
        began: Mapping[str, Any],
        states: Sequence[dict[str, Any]] | None,
    ) -> None:
        self.inner, self.answers, self.began, self.states = inner, answers, began, states

    def __call__(self, worker_id: int) -> None:
        if self.inner is not None:
            self.inner(worker_id)
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset.inner if isinstance(info.dataset, SeededSamples) else info.dataset
        worker = _Worker(dataset, self.began)
        if self.states is not None:
            worker.restore(self.states[worker_id])
        # This process is the worker's own, and does nothing else.
        _DatasetKind.create_fetcher = staticmethod(worker.watch_fetchers(_DatasetKind.create_fetcher))
        threading.Thread(target=worker.answer, args=(self.answers[worker_id],), daemon=True).start()


class _Worker:
    """Knows the states of this worker, and answers between its batches."""

    def __init__(self, dataset: Any, began: Mapping[str, Any]) -> None:
        self.dataset, self.keeps_position, self.own = dataset, keeps_position(dataset), OwnState()
        self.attributes = Attributes([dataset], began, only_generators=self.keeps_position)
        self.lock = threading.Lock()  # held while the dataset is read
        self.passes, self.read, self.has_ended = -1, 0, False
        self.at_start: dict[str, Any] = {}

    def read_state(self) -> dict[str, Any]:
        own = self.own.read(self.dataset) if self.keeps_position else None
        return {"random": random_state(), "attributes": self.attributes.changes(), "own": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["own"] is not None:
            self.dataset.load_state_dict(state["own"])
        self.attributes.restore(state["attributes"])
        set_random_state(state["random"])

    def watch_fetchers(self, create_fetcher: Callable[..., Any]) -> Callable[..., Any]:
        def create_watched_fetcher(*args: Any) -> Any:
            with self.lock:
                self.passes, self.read, self.has_ended = self.passes + 1, 0, False
                self.at_start = self.read_state()
                fetcher = create_fetcher(*args)  # begins to iterate over the dataset
            fetcher.fetch = self.watch_fetch(fetcher.fetch)
            return fetcher

        return create_watched_fetcher

    def watch_fetch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched_fetch(indices: Any) -> Any:
            with self.lock:
                self.read += 1
                try:
                    return fetch(indices)
                except StopIteration:
                    self.has_ended = True
                    raise

        return watched_fetch

    def answer(self, questions: Any) -> None:
        try:
            while True:
                number = questions.recv()
                with self.lock:
                    now = self.read_state()
                    answer = _Answer(self.passes, self.read, self.has_ended, self.at_start, now)
                questions.send((number, answer))
        except (OSError, EOFError):  # the loading process has ended
            return
