"""Shared state of the stages of a rehearsal, and errors that end it on all ranks."""

import copy
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fasttrain.checkpoint.loader_state.attributes import watch_attributes
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader
from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.distributed import gather_values
from lightning_fasttrain.core.host.lightning import training_loaders, validation_loaders
from lightning_fasttrain.core.messages import Report, ReportTable, explain, first_line, say
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.loaders.device_prefetch import DevicePrefetcher
from lightning_fasttrain.proof.rehearsal.disk_space import Place, saves_within_epochs, writers_of
from lightning_fasttrain.proof.rehearsal.run_copy import RunCopy
from lightning_fasttrain.proof.rehearsal.small_run import Course
from lightning_fasttrain.technique.technique import predict_window


class RehearsalError(RuntimeError):
    """The run would have failed later, or would train differently: what, why, and the cheapest way out."""


@dataclass
class RehearsalReport(Report):
    """Five lines, and the values in them.

    Attributes:
        lines: stage → its line: ``verify``, ``step``, ``checkpoint``, ``resume``, ``largest batch``.
        notes: what was left out, and why.
        verified: whether training with the techniques is the same; None if it was not checked.
        predicted_bytes: the peak of a step on this rank; None if it could not be predicted.
        step_s: seconds of an optimizer step, with all batches of its window.
        save_s: seconds of a save.
        checkpoint_bytes: size of one checkpoint on disk.
        kept: maximum number of checkpoints that the run will keep; None if it is unknown.
        resumed_exactly: whether the step after a load was the uninterrupted run's; None if none was compared.
        batches_seen: number of batches that were read to find the largest.
        seconds: total duration.
    """

    lines: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verified: bool | None = None
    predicted_bytes: int | None = None
    step_s: float | None = None
    save_s: float | None = None
    checkpoint_bytes: int | None = None
    kept: int | None = None
    resumed_exactly: bool | None = None
    batches_seen: int = 0
    seconds: float = 0.0

    def tell(self, stage: str, sentence: str) -> None:
        """Store the line of a stage, and log it at once, since a rehearsal may take a minute."""
        self.lines[stage] = sentence
        say("rehearsal, %s: %s", stage, sentence)

    def as_table(self) -> ReportTable:
        """Build the table of the stages."""
        notes = [*self.notes, f"Rehearsed in {self.seconds:.1f} s."]
        table = ReportTable("Rehearsal", {"stage": "name", "result": "prose"}, notes)
        for stage, sentence in self.lines.items():
            table.add(stage, sentence)
        return table


_SAME_SIZE = 16  # batches of the same size: from here on all others are assumed to have it
_MOST = 500


@dataclass
class Sample:
    """A sample of the batches of a loader.

    Attributes:
        first: its first batches.
        largest: the largest of all batches that were read, in bytes; None if it is not larger than the first ones.
        seen: number of batches that were read.
    """

    first: list[Any] = field(default_factory=list)
    largest: Any = None
    seen: int = 0


def combine(loader: object) -> CombinedLoader:
    """Return a loader, or a collection of loaders, as Lightning combines them for training."""
    return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")


def length_of(loader: object) -> float:
    """Return the number of batches of an epoch from a loader, or a collection of loaders; infinity where it is unknown.

    Lightning's ``CombinedLoader`` has a length only while it is iterated over.
    """
    loaders, lengths = combine(loader), list[float]()
    for one in loaders.flattened:
        length = sized_len(one)
        lengths.append(math.inf if length is None else length)
    return {"min_size": min, "sequential": sum}.get(loaders._mode, max)(lengths)


@contextmanager
def reading_ahead(loaders: CombinedLoader) -> Iterator[Iterator[Any]]:
    """Iterate over a run's loaders from their beginning; random states, including the loaders' own, are restored.

    The loaders are copied, but not their data: what a dataset holds beyond plain values may change while it is read.

    Raises:
        RehearsalError: a loader is an iterator, so the run could not read its batches again.
    """
    plain = list(map(_without_ours, loaders.flattened))
    for loader in plain:
        if isinstance(loader, Iterator):
            why = "the run could not read its first batches again"
            way_out = "Pass a DataLoader, or an object whose __iter__ starts over; or remove Rehearsal"
            raise RehearsalError(explain(f"the loader is a {type(loader).__name__}", why, way_out))
    numbers = random_state()
    watched = list(map(watch_attributes, plain))
    changes = [attributes.changes() for attributes in watched]
    # A copy keeps the mode in which the loaders are combined.
    fresh = copy.copy(loaders)
    fresh.flattened = list(map(_copy_loader, plain))
    try:
        # CombinedLoader yields (batch, its index, the index of its loader).
        yield map(itemgetter(0), iter(fresh))
    finally:
        fresh.reset()  # ends the workers
        for attributes, then in zip(watched, changes, strict=True):
            attributes.restore(then)
        set_random_state(numbers)


def take_sample(loaders: CombinedLoader, first: int, seconds: float) -> Sample:
    """Read the first batches, and further ones for ``seconds`` seconds as long as their sizes differ.

    Args:
        loaders: the loaders of the run, which are not changed.
        first: number of batches that are kept.
        seconds: time limit for the further batches.
    """
    sample = Sample()
    with reading_ahead(loaders) as batches:
        sample.first = list(itertools.islice(batches, first))
        sizes = list(map(count_bytes, sample.first))
        most, end = max(sizes, default=0), time.monotonic() + seconds
        while time.monotonic() < end and len(sizes) < _MOST and not _have_one_size(sizes):
            batch = next(batches, None)
            if batch is None:
                break
            sizes.append(count_bytes(batch))
            if sizes[-1] > most:
                most, sample.largest = sizes[-1], batch
    sample.seen = len(sizes)
    return sample


def describe_batch(batch: object) -> str:
    """Describe a batch by the shape of its largest tensor.

    Example:
        >>> import torch
        >>> describe_batch({"ids": torch.zeros(2, 3), "lengths": torch.zeros(2)})
        '2 × 3'
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if largest is None:
        return type(batch).__name__
    return " × ".join(map(str, largest.shape)) or "a scalar"


def _have_one_size(sizes: list[int]) -> bool:
    return len(sizes) >= _SAME_SIZE and len(set(sizes)) == 1


def _without_ours(loader: object) -> Any:
    """Return the user's loader, without the wrappers of this run's techniques."""
    while isinstance(loader, ResumableLoader | DevicePrefetcher):
        loader = loader.inner
    return loader


def _copy_loader(loader: object) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    fresh = copy.copy(loader)
    fresh._iterator = None  # persistent workers belong to the run
    return fresh


A = TypeVar("A")


@dataclass(frozen=True)
class Rehearsed:
    """Shared state of the stages.

    Attributes:
        trainer: the Trainer of the run.
        run: a copy of the run.
        sample: a sample of its training batches.
        validation: a batch of each validation loader.
        window: number of batches per optimizer step.
        places: folders of its checkpoints.
        folder: a temporary folder on the same disk.
        report: findings so far.
    """

    trainer: L.Trainer
    run: RunCopy
    sample: Sample
    validation: list[list[Any]]
    window: int
    places: list[Place]
    folder: Path
    report: RehearsalReport

    @property
    def batches(self) -> list[Any]:
        """The batches of a small epoch: a complete window, and a short one or, if saves happen between, a second."""
        needs_another = self.window > 1 or saves_within_epochs(writers_of(self.trainer))
        return fill_up(self.sample.first, self.window + needs_another)

    def ask_all(self, answer: A) -> list[A]:
        """Return the answers of all ranks, as plain values. All ranks must call it."""
        return gather_values(answer, self.trainer.strategy.root_device)

    def raise_on_all(self, problem: str | None) -> None:
        """Raise the first problem of any rank on all ranks, since the others would wait for a failed one."""
        for rank, found in enumerate(self.ask_all(problem)):
            if found is not None:
                raise RehearsalError(f"on rank {rank}, {found}" if rank > 0 else found)


def fill_up(batches: list[Any], count: int) -> list[Any]:
    """Return ``count`` batches, repeated if there are fewer.

    Example:
        >>> fill_up(["a", "b"], 3)
        ['a', 'b', 'a']
    """
    return list(islice(cycle(batches), count))


def find_window(trainer: L.Trainer, run: RunCopy) -> int:
    """Return the number of batches per optimizer step, set by the Trainer or by techniques."""
    return max(trainer.accumulate_grad_batches, predict_window(run.techniques))


def read_batches(trainer: L.Trainer, window: int, seconds: float) -> tuple[Sample, list[list[Any]]]:
    """Read a sample of the training loaders, and a batch of each validation loader.

    Raises:
        RehearsalError: there is no batch to train on, or a loader can be read only once.
    """
    loaders = training_loaders(trainer)
    sample = Sample()
    if loaders is not None:
        sample = take_sample(loaders, window + 1, seconds)
    if not sample.first:
        raise RehearsalError(explain("the training loader", "it has no batches", "Check the dataset and its filters"))
    validation: list[list[Any]] = []
    for loader in validation_loaders(trainer):
        with reading_ahead(CombinedLoader(loader, "sequential")) as batches:
            validation.append(list(islice(batches, 1)))
    return sample, validation


@contextmanager
def explain_errors(course: Course, during: str = "") -> Iterator[None]:
    """Turn any error of a small run into a RehearsalError, which ends this rank at once, as in the run."""
    try:
        yield
    except Exception as error:
        kind, way_out = type(error).__name__, "Fix the error above, which would have stopped the run"
        if is_out_of_memory(error):
            kind = "out of memory"
            way_out = 'Use ft.MicroBatching("auto") or ft.ActivationCheckpointing(), or smaller batches'
        why = f"{kind}: {first_line(error)}".rstrip(".")
        raise RehearsalError(explain(f"rehearsing {during}{course.reached}", why, way_out)) from error
