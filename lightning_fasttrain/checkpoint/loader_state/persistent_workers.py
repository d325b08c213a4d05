"""State of persistent workers, whose random numbers, counters and datasets continue from one pass to the next.

Each worker answers what it was at the beginning of the pass, and what it is now. The workers of a resumed run begin
with what was saved, instead of reading all earlier passes.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from lightning_fasttrain.checkpoint.loader_state.attributes import Attributes, watch_attributes
from lightning_fasttrain.checkpoint.loader_state.dataset_state import OwnState, keeps_position
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.state.rng import SeededSamples, random_state, set_random_state

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
