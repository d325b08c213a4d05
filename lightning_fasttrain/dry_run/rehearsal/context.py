"""What the stages of a rehearsal work on, and how they end in one error, on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_fasttrain.core.files.safe_load import first_line
from lightning_fasttrain.core.host.lightning import training_loaders, validation_loaders
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.dry_run.rehearsal.disk_space import Place, saves_within_epochs, writers_of
from lightning_fasttrain.dry_run.rehearsal.peek_batches import Sample, reading_ahead, take_sample
from lightning_fasttrain.dry_run.rehearsal.rehearsal_report import RehearsalError, RehearsalReport
from lightning_fasttrain.dry_run.rehearsal.run_copy import RunCopy
from lightning_fasttrain.dry_run.rehearsal.small_run import Course
from lightning_fasttrain.run.checkpoint._gathered_states import gather, pack, unpack
from lightning_fasttrain.technique.predicted_step import PredictedStep

A = TypeVar("A")


@dataclass(frozen=True)
class Rehearsed:
    """What the stages work on.

    Attributes:
        trainer: the run's.
        run: the copy of it.
        sample: of its training batches.
        validation: a batch of each validation loader.
        window: batches of an optimizer step.
        places: where checkpoints go.
        folder: a temporary one on that disk.
        report: what was found so far.
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
        """Those of an epoch in small: a whole window, and a short one or, where saves come in between, another one."""
        goes_on = self.window > 1 or saves_within_epochs(writers_of(self.trainer))
        return fill_up(self.sample.first, self.window + goes_on)

    def ask_all(self, answer: A) -> list[A]:
        """What each rank answers: plain values. All ranks must ask."""
        everyone = gather(pack({"answer": answer}), self.trainer.strategy.root_device)
        return [unpack(one)["answer"] for one in everyone]

    def raise_on_all(self, problem: str | None) -> None:
        """Raise the first problem that any rank has, on all of them; a rank that failed alone would be waited for."""
        for rank, found in enumerate(self.ask_all(problem)):
            if found is not None:
                raise RehearsalError(f"on rank {rank}, {found}" if rank > 0 else found)


def fill_up(batches: list[Any], count: int) -> list[Any]:
    """So many batches, the same ones again where there are fewer.

    Example:
        >>> fill_up(["a", "b"], 3)
        ['a', 'b', 'a']
    """
    return [batches[number % len(batches)] for number in range(count)]


def find_window(trainer: L.Trainer, run: RunCopy) -> int:
    """How many batches make an optimizer step, by the Trainer or by techniques."""
    planned = PredictedStep()
    for technique in run.techniques:
        with suppress(ValueError):  # one that cannot be predicted
            technique.predict(planned)
    return max(trainer.accumulate_grad_batches, planned.window)


def read_batches(trainer: L.Trainer, window: int, seconds: float) -> tuple[Sample, list[list[Any]]]:
    """Of the training loaders a sample, of each validation loader a batch.

    Raises:
        RehearsalError: there is no batch to train on, or a loader that can be read only once.
    """
    loaders = training_loaders(trainer)
    sample = Sample() if loaders is None else take_sample(loaders, window + 1, seconds)
    if not sample.first:
        raise RehearsalError(explain("the training loader", "it gives no batch", "Check the dataset and its filters"))
    validation: list[list[Any]] = []
    for loader in validation_loaders(trainer):
        with reading_ahead(CombinedLoader(loader, "sequential")) as batches:
            validation.append(list(islice(batches, 1)))
    return sample, validation


@contextmanager
def explain_errors(course: Course, during: str = "") -> Iterator[None]:
    """Any error of a run in small, as the one error of the rehearsal. It ends this rank at once, as in the run."""
    try:
        yield
    except torch.OutOfMemoryError as error:  # before Exception, of which it is one
        what = f"rehearsing {during}{course.reached}"
        why = f"out of memory: {first_line(error)}".rstrip(".")
        way_out = 'Give ft.MicroBatching("auto") or ft.ActivationCheckpointing(), or smaller batches'
        raise RehearsalError(explain(what, why, way_out)) from error
    except Exception as error:
        what = f"rehearsing {during}{course.reached}"
        why = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        way_out = "Mend what the error above names: the run would have come to it"
        raise RehearsalError(explain(what, why, way_out)) from error
