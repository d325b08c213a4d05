"""Report samples that cannot be read and workers that die, and optionally skip bad samples."""

import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_fasttrain.core.checks import NonNegativeInt, check_arguments
from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader, find_innermost, wrap_training_loaders
from lightning_fasttrain.core.messages import explain, number_of, warn_on_any_rank
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Technique


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read.

    Attributes:
        index: the index that was read.
        worker: the number of the worker process that read it; None: the training process itself.
        error: the exception's class and message, and where it was raised.
    """

    index: Any
    worker: int | None
    error: str

    def __str__(self) -> str:
        reader = "the training process" if self.worker is None else f"worker {self.worker}"
        return f"sample {self.index!r}, read by {reader}: {self.error}"


@dataclass
class Envelope:
    """A batch together with its unreadable samples; it supports the operations of a batch.

    Attributes:
        batch: None if no sample could be read.
        bad: the samples that could not be read.
    """

    batch: Any
    bad: list[BadSample]

    # torch calls this method on batches of unknown types.
    def pin_memory(self) -> "Envelope":
        return Envelope(pin_memory(self.batch), self.bad)


class TolerantDataset(Dataset[Any]):
    """Returns a :class:`BadSample` where the dataset raises.

    Args:
        inner: a map-style dataset.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        if callable(getattr(inner, "__getitems__", None)):
            # Set on the object: torch reads samples together if the dataset has this method, and not every dataset
            # does.
            self.__getitems__ = self._read_several

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.inner[index]
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            # As text, since not every exception can be pickled for the way back from a worker.
            worker = getattr(get_worker_info(), "id", None)
            return BadSample(index, worker, f"{type(error).__name__}: {error} ({where})")

    def _read_several(self, indices: list[Any]) -> list[Any]:
        try:
            return self.inner.__getitems__(indices)
        except Exception:  # read one by one to find which of them failed
            return list(map(self.__getitem__, indices))


class Sieve:
    """Collates the samples that could be read.

    Args:
        collate: the loader's own ``collate_fn``.
    """

    def __init__(self, collate: Callable[[Any], object]) -> None:
        self.collate = collate

    def __call__(self, samples: object) -> Envelope:
        if isinstance(samples, BadSample):  # a loader with batch_size=None
            return Envelope(None, [samples])
        if not isinstance(samples, list):
            return Envelope(self.collate(samples), [])
        bad: list[BadSample] = []
        good: list[Any] = []
        for sample in samples:
            (bad if isinstance(sample, BadSample) else good).append(sample)
        return Envelope(self.collate(good) if good else None, bad)


@check_arguments
def guard_samples(loader: object, skip_bad_samples: NonNegativeInt = 0) -> "GuardedLoader":
    """Wrap a ``DataLoader`` so that it reports samples that it cannot read, and skips some of them.

    A sample whose ``__getitem__`` raises is left out of its batch, which is then one row shorter. An error is raised
    for the first one beyond ``skip_bad_samples``, and for a batch without any readable sample, since other ranks would
    wait for a rank that skips the step. A worker that dies is reported with its exit code and the batch that it was to
    deliver next.

    For an ``IterableDataset``, which ends with its first error, and for loaders of other types, only torch's errors
    about workers are made clearer.

    Args:
        loader: a ``DataLoader``, possibly wrapped by this package; it is changed until :meth:`GuardedLoader.close`.
        skip_bad_samples: how many samples may be skipped in total, in this process.

    Returns:
        The wrapped loader; its ``skipped`` is the number of skipped samples.

    Raises:
        ValueError: ``skip_bad_samples`` is negative.
        RuntimeError: while iterating: one sample too many, a batch without samples, or a worker that ended.

    Example:
        >>> class Files(torch.utils.data.Dataset):
        ...     def __len__(self): return 4
        ...     def __getitem__(self, index): return 1 / (index - 1)
        >>> loader = guard_samples(DataLoader(Files(), batch_size=2), skip_bad_samples=1)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     [batch.tolist() for batch in loader]
        [[-1.0], [1.0, 0.5]]
        >>> "sample 1, read by the training process: ZeroDivisionError" in str(caught[0].message)
        True

    Source:
        Replaces the usual pattern of a dataset that returns ``None`` and a ``collate_fn`` that drops it.
    """
    return GuardedLoader(loader, Tally(skip_bad_samples))


@dataclass
class Tally:
    """The number of samples that may be skipped, and that were."""

    limit: int
    skipped: int = 0


class GuardedLoader(WrappedLoader):
    """See :func:`guard_samples`."""

    def __init__(self, inner: Any, tally: Tally) -> None:
        super().__init__(inner)
        self._tally = tally
        self._batches: Callable[[], Any] = lambda: None  # torch's iterator, which stops its workers when it is freed
        self._undo = ExitStack()
        loader = find_innermost(inner)
        if isinstance(loader, DataLoader):
            self._undo.callback(_let_bad_samples_through_(loader, self._note_pass))

    @property
    def skipped(self) -> int:
        """Number of samples skipped so far."""
        return self._tally.skipped

    def close(self) -> None:
        """Restore the loader; a pass in progress stays guarded."""
        self._undo.close()

    def __iter__(self) -> Iterator[Any]:
        return _Unpacked(self, iter(self.inner))

    def _note_pass(self, batches: object) -> None:
        self._batches = weakref.ref(batches)

    def _open(self, envelope: object) -> Any:
        if not isinstance(envelope, Envelope):
            return envelope
        tally = self._tally
        for bad in envelope.bad:
            if tally.skipped >= tally.limit:
                why = f"skip_bad_samples={tally.limit}, and as many samples have been skipped already"
                raise RuntimeError(explain(str(bad), why, "Fix this sample, or allow more"))
            tally.skipped += 1
            warn_on_any_rank(f"{bad}. It is skipped ({tally.skipped} of at most {tally.limit}).")
        if envelope.bad and envelope.batch is None:
            why = "a step needs at least one sample"
            raise RuntimeError(explain(f"a batch has no readable sample: {envelope.bad[-1]}", why, "Fix them"))
        return envelope.batch

    def _death(self, within_s: float) -> str:
        """Return what is known of workers that died, or die within some seconds; "" if none did."""
        batches = self._batches()
        workers = list(getattr(batches, "_workers", ()))
        until = time.monotonic() + within_s
        # A worker's connection breaks a moment before the system reports its end.
        while not any(worker.exitcode for worker in workers) and (left_s := until - time.monotonic()) > 0:
            wait([worker.sentinel for worker in workers], left_s)
        for number, worker in enumerate(workers):
            code = worker.exitcode
            if code is None or code == 0:
                continue
            ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            # The entry of a batch that has arrived holds it beside the worker's number.
            waiting = [batch for batch, task in batches._task_info.items() if task == (number,)]
            batch = f"; its next batch was number {min(waiting)} of this pass" if waiting else ""
            return f"worker {number} of the loader (process {worker.pid}) died {ended}{batch}"
        return ""


class _Unpacked(Iterator[Any]):
    """One pass over the data."""

    def __init__(self, loader: GuardedLoader, envelopes: Iterator[object]) -> None:
        self.loader, self.envelopes = loader, envelopes

    def __next__(self) -> Any:
        try:
            envelope = next(self.envelopes)
        # torch raises RuntimeError when it finds a dead worker; a broken queue raises the others.
        except (RuntimeError, OSError, EOFError) as error:
            within_s = 2.0 if isinstance(error, OSError | EOFError) else 0.0
            try:
                death = self.loader._death(within_s)
            except RuntimeError:  # torch raises one in its signal handler, at the moment when a worker ends
                death = self.loader._death(within_s)
            if not death:
                raise
            why = "SIGKILL often means that the system ran out of memory, SIGBUS that shared memory ran out"
            way_out = "Use fewer workers or smaller samples, or num_workers=0 to see the original error"
            raise RuntimeError(explain(death, why, way_out)) from error
        return self.loader._open(envelope)


def _let_bad_samples_through_(loader: DataLoader[object], note: Callable[[Any], None]) -> Undo:
    """Make the passes over ``loader`` yield envelopes; ``dataset`` and ``collate_fn`` are restored in between."""
    own = loader._get_iterator

    def forget_workers() -> None:
        loader._iterator = None  # persistent workers keep the dataset that they started with

    def get_iterator() -> Any:
        undo = ExitStack()
        if not isinstance(loader.dataset, IterableDataset):
            # An iterator reads both when it is created. torch forbids setting a dataset, hence vars().
            places, before = vars(loader), (loader.dataset, loader.collate_fn)
            undo.callback(places.update, dataset=before[0], collate_fn=before[1])
            places.update(dataset=TolerantDataset(before[0]), collate_fn=Sieve(before[1]))
        with undo:
            batches = own()
        note(batches)
        return batches

    forget_workers()
    undo = ExitStack()
    undo.callback(forget_workers)
    undo.callback(patch(loader, "_get_iterator", get_iterator))
    return undo.close


class SampleGuard(Technique):
    """Report samples that cannot be read and workers that die; skip as many samples as allowed.

    Acts where the strategy processes its training loaders. Checkpoints hold the number of skipped samples of each
    process, so a resumed run may skip the remaining ones. List it after techniques that fetch batches ahead, such as
    :class:`~lightning_fasttrain.DevicePrefetch`, so that only samples of used batches are counted.

    Args:
        skip_bad_samples: how many samples may be skipped in a run, on each process; with 0 the first one raises an
            error that names it.

    Raises:
        ValueError: ``skip_bad_samples`` is negative.
        RuntimeError: in ``fit``: one bad sample too many, a batch without samples, or a worker that died.

    Example:
        >>> guard = SampleGuard(skip_bad_samples=10)

    Source:
        See :func:`~lightning_fasttrain.loaders.guard_samples`.
    """

    effect: ClassVar[str] = "bad samples are reported and skipped, up to a limit; dead workers are reported"
    when: ClassVar[str] = "some of many files may be broken; not where each sample must be trained on"
    in_a_loop: ClassVar[str] = "loaders.guard_samples(loader, skip_bad_samples)"
    predicted: ClassVar[bool] = True

    def __init__(self, skip_bad_samples: NonNegativeInt = 0) -> None:
        self.skip_bad_samples = skip_bad_samples
        self._tally = Tally(skip_bad_samples)

    @property
    def skipped(self) -> int:
        """Number of samples skipped so far, in this process."""
        return self._tally.skipped

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self._tally = tally = Tally(self.skip_bad_samples)
        loaders: list[GuardedLoader] = []

        def wrap(loader: object) -> GuardedLoader:
            loaders.append(GuardedLoader(loader, tally))
            return loaders[-1]

        leave = wrap_training_loaders(trainer, wrap)

        def undo() -> None:
            leave()
            while loaders:
                loaders.pop().close()

        return undo

    def outcome(self, model: nn.Module) -> str:
        return f"skipped {number_of(self.skipped, 'bad sample')}" if self.skipped else ""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: called on all processes, whichever writes the file; after an error each process saves its own count."""
        mine = torch.tensor([self.skipped], device=trainer.strategy.root_device)
        everyone = mine if trainer.interrupted else trainer.strategy.all_gather(mine)
        checkpoint["SampleGuard"] = everyone.flatten().tolist()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: called before or after loaders are created, depending on the strategy."""
        counts = checkpoint.get("SampleGuard", [])
        if trainer.state.fn == "fit" and len(counts) > trainer.global_rank:
            self._tally.skipped = counts[trainer.global_rank]
