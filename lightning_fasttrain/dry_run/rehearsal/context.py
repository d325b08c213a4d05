"""Shared state of the stages of a rehearsal, and errors that end it on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_fasttrain.core.host.lightning import training_loaders, validation_loaders
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.dry_run.rehearsal.disk_space import Place, saves_within_epochs, writers_of
from lightning_fasttrain.dry_run.rehearsal.peek_batches import Sample, reading_ahead, take_sample
from lightning_fasttrain.dry_run.rehearsal.rehearsal_report import RehearsalError, RehearsalReport
from lightning_fasttrain.dry_run.rehearsal.run_copy import RunCopy
from lightning_fasttrain.dry_run.rehearsal.small_run import Course
from lightning_fasttrain.run.checkpoint.gathered_states import gather, pack, unpack
from lightning_fasttrain.technique.technique import predict_window

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
        return gather_answers(self.trainer, answer)

    def raise_on_all(self, problem: str | None) -> None:
        """Raise the first problem of any rank on all ranks, since the others would wait for a failed one."""
        for rank, found in enumerate(self.ask_all(problem)):
            if found is not None:
                raise RehearsalError(f"on rank {rank}, {found}" if rank > 0 else found)


def gather_answers(trainer: L.Trainer, answer: A) -> list[A]:
    """Return the answers of all ranks, as plain values. All ranks must call it."""
    everyone = gather(pack({"answer": answer}), trainer.strategy.root_device)
    return [unpack(one)["answer"] for one in everyone]


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
        if isinstance(error, torch.OutOfMemoryError):
            kind = "out of memory"
            way_out = 'Use ft.MicroBatching("auto") or ft.ActivationCheckpointing(), or smaller batches'
        why = f"{kind}: {first_line(error)}".rstrip(".")
        raise RehearsalError(explain(f"rehearsing {during}{course.reached}", why, way_out)) from error
