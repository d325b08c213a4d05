"""State of persistent workers, which go on from one pass over the data to the next.

Each worker writes to memory that it shares with the loading process what it was at the beginning of the pass, and what
it is after each batch. The workers of a resumed run begin with what is saved, instead of reading all earlier passes.
"""

import io
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.state.rng import SeededSamples, random_state, set_random_state
from lightning_fasttrain.run.checkpoint.loaders.attributes import Attributes, watch_attributes
from lightning_fasttrain.run.checkpoint.loaders.dataset_state import (
    OwnState,
    keeps_position,
)

_ROOM = 2**18  # bytes for the report of a worker, which takes about 30 KB
_PATIENCE_S = 60.0  # for batches that workers read ahead at the end of a pass
_DATASET = "0."  # where a loader's attributes begin with those of the dataset


class _Report(NamedTuple):
    passes: int  # that the worker has begun
    read: int  # batches in this pass
    has_ended: bool
    at_start: dict[str, Any] | None  # states; None if they do not fit
    now: dict[str, Any] | None


class LastingWorkers:
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
        context = loader.multiprocessing_context or torch.multiprocessing
        self._memory: list[Any] = [context.Array("B", _ROOM) for _ in range(loader.num_workers)]
        self._queues: list[_CountingQueue] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context in which the loader starts the workers."""
        loader, saved = self.loader, self._saved
        began = {key: value for key, value in watch_attributes(loader).began.items() if key.startswith(_DATASET)}
        init = _Reporting(loader.worker_init_fn, self._memory, began, None if saved is None else saved["states"])
        generator = loader.generator
        if saved is not None:
            generator = torch.Generator()
            generator.set_state(self._seed)
        with patched(loader, "worker_init_fn", init), patched(loader, "generator", generator):
            yield
        workers: Any = loader._iterator
        sent = [sum(info[0] == worker for info in workers._task_info.values()) for worker in range(loader.num_workers)]
        self._queues = [_CountingQueue(*pair) for pair in zip(workers._index_queues, sent, strict=True)]
        workers._index_queues = self._queues
        _known[workers] = self

    def at_start(self) -> dict[str, Any] | None:
        """Return the state in which workers began this pass; None for the first pass of a run."""
        if self.passes == 0:
            return self._saved
        return self._wait(lambda report, queue: True, lambda report: report.at_start)

    def between_passes(self) -> dict[str, Any] | None:
        """Return the state in which workers will begin the next pass, once they have read what they were told to."""
        return self._wait(
            lambda report, queue: report.has_ended or report.read >= queue.sent, lambda report: report.now
        )

    def _wait(
        self, is_ready: Callable[[_Report, "_CountingQueue"], bool], choose: Callable[[_Report], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        states, until = [], time.monotonic() + _PATIENCE_S
        for memory, queue in zip(self._memory, self._queues, strict=True):
            report = _read(memory)
            while report is None or report.passes < self.passes or not is_ready(report, queue):
                if time.monotonic() > until:
                    return self._say_unknown("they still read")
                time.sleep(0.001)
                report = _read(memory)
            states.append(choose(report))
        if None in states:
            return self._say_unknown(f"it has more than {_ROOM // 1024} KB")
        return {"seed": self._seed, "states": states}

    def _say_unknown(self, why: str) -> None:
        what = "the state of persistent workers is not saved"
        way_out = "Give the dataset state_dict() and load_state_dict(), or use persistent_workers=False"
        warn(explain(what, why, f"A resumed run starts them anew. {way_out}"))


_known: WeakKeyDictionary[Any, LastingWorkers] = WeakKeyDictionary()  # the loader's iterator → its workers


def find_lasting_workers(loader: DataLoader[Any]) -> LastingWorkers | None:
    """Return the running workers of a loader; None if they do not run, or started unobserved and are shut down."""
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
    """Counts the batches that a worker was told to read in this pass."""

    def __init__(self, inner: Any, sent: int) -> None:
        self.inner, self.sent = inner, sent

    def put(self, task: object) -> None:
        # Other tasks are a new pass and the end.
        self.sent = self.sent + 1 if isinstance(task, tuple) else 0
        self.inner.put(task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Reporting:
    """A ``worker_init_fn`` after which the worker reports its states."""

    def __init__(
        self, inner: Callable[[int], None] | None, memory: list[Any], began: Mapping[str, Any], states: Any
    ) -> None:
        self.inner, self.memory, self.began, self.states = inner, memory, began, states

    def __call__(self, worker_id: int) -> None:
        if self.inner is not None:
            self.inner(worker_id)
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset.inner if isinstance(info.dataset, SeededSamples) else info.dataset
        worker = _Worker(dataset, self.memory[worker_id], self.began)
        if self.states is not None:
            worker.restore(self.states[worker_id])
        # This process is the worker's own, and does nothing else.
        _DatasetKind.create_fetcher = staticmethod(worker.reporting(_DatasetKind.create_fetcher))


class _Worker:
    """Writes the state of this worker."""

    def __init__(self, dataset: Any, memory: Any, began: Mapping[str, Any]) -> None:
        self.dataset, self.memory = dataset, memory
        self.keeps_position, self.own = keeps_position(dataset), OwnState()
        self.attributes = Attributes([dataset], began, only_generators=self.keeps_position)
        self.passes, self.at_start = -1, b""

    def read_state(self) -> dict[str, Any]:
        own = self.own.read(self.dataset) if self.keeps_position else None
        return {"random": random_state(), "attributes": self.attributes.changes(), "own": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["own"] is not None:
            self.dataset.load_state_dict(state["own"])
        self.attributes.restore(state["attributes"])
        set_random_state(state["random"])

    def reporting(self, create_fetcher: Callable[..., Any]) -> Callable[..., Any]:
        def create_reporting_fetcher(*args: Any) -> Any:
            self.passes, self.read, self.has_ended = self.passes + 1, 0, False
            self.at_start = _dump(self.read_state())
            self.report(self.at_start)
            fetcher = create_fetcher(*args)  # begins to iterate over the dataset
            fetcher.fetch = self.reporting_fetch(fetcher.fetch)
            return fetcher

        return create_reporting_fetcher

    def reporting_fetch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetch_and_report(indices: Any) -> Any:
            try:
                return fetch(indices)
            except StopIteration:
                self.has_ended = True
                raise
            finally:
                self.read += 1
                self.report(_dump(self.read_state()))

        return fetch_and_report

    def report(self, now: bytes) -> None:
        header = pickle.dumps((self.passes, self.read, self.has_ended, len(self.at_start), len(now)))
        data = len(header).to_bytes(8, "little") + header
        if len(data) + len(self.at_start) + len(now) <= _ROOM:
            data += self.at_start + now
        with self.memory.get_lock():
            memoryview(self.memory.get_obj()).cast("B")[: len(data)] = data


def _read(memory: Any) -> _Report | None:
    with memory.get_lock():
        data = memoryview(memory.get_obj()).cast("B")
        first = 8 + int.from_bytes(data[:8], "little")
        if first == 8:
            return None
        passes, read, has_ended, size, size_now = pickle.loads(data[8:first])
        if first + size + size_now > _ROOM:
            return _Report(passes, read, has_ended, None, None)
        at_start, now = data[first : first + size], data[first + size : first + size + size_now]
        return _Report(passes, read, has_ended, pickle.loads(at_start), pickle.loads(now))


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which takes a tenth of the time."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.dtype is not torch.bfloat16:
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _dump(state: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(state)
    return buffer.getvalue()
