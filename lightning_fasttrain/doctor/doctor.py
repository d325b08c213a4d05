"""A callback that watches the first steps of a run, and reports what costs time or memory, with lines and cures."""

import os
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import lightning as L

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_here
from lightning_fasttrain.doctor.diagnose import diagnose
from lightning_fasttrain.doctor.diagnosis import Diagnosis
from lightning_fasttrain.doctor.observation.watch import MANY_STEPS, StepCount, Watch
from lightning_fasttrain.doctor.observation.watched_calls import TrainerPatches
from lightning_fasttrain.doctor.page import save_diagnosis
from lightning_fasttrain.proof.rehearsal.rehearsal import is_rehearsing
from lightning_fasttrain.step_time.machine import Machine, read_machine
from lightning_fasttrain.technique.technique import needs_an_object


@check_arguments(steps=MANY_STEPS)
class Doctor(L.Callback):
    """Watches some steps of a run, prints what costs time, memory or accuracy in them, and is silent afterwards.

    Each finding has its measured cost, the line of your own code, and a cure. The run is not changed: its weights are
    bitwise those of a run without the doctor. On several ranks the first one is watched, and the others are timed.

    Args:
        steps: number of optimizer steps to watch, at least 6; three of them are looked at in detail.
        warmup: number of steps before them.
        out: folder for ``doctor.html`` and ``doctor.json``; with it, the memory of one step is recorded.
        show: whether the findings are printed.
        machine: the device whose rates the step is compared with: an accelerator by name, the file that ``fasttrain
            machine --out FILE`` wrote, or a :class:`~lightning_fasttrain.step_time.Machine`; by default the GPU by its
            data sheet, and nothing on a CPU.

    Attributes:
        diagnosis: the result; None until all steps were watched, or the run ended.

    Raises:
        TypeError, ValueError: a number of steps is invalid, or the machine is unknown.
        FileNotFoundError: there is no such file of a machine.

    Example:
        >>> import lightning_fasttrain as ft
        >>> doctor = ft.Doctor(steps=20)  # Trainer(callbacks=[doctor])
        >>> doctor.diagnosis is None
        True

    Source:
        Ours.
    """

    watches_copies: ClassVar[bool] = False  # whether it acts in the copies of a run that a rehearsal makes

    def __init__(
        self,
        steps: StepCount = 20,
        warmup: PositiveInt = 3,
        out: str | os.PathLike[str] | None = None,
        show: bool = True,
        machine: str | os.PathLike[str] | Machine | None = None,
    ) -> None:
        self.machine = None if machine is None else read_machine(machine)
        self.steps, self.warmup = steps, warmup
        self.out, self.show = out, show
        self.diagnosis: Diagnosis | None = None
        self._watch: Watch | None = None
        self._patches: TrainerPatches | None = None
        self._validation_began = 0.0
        self._is_done = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: optimizers and loaders exist, and no batch was requested yet."""
        doctors = [callback for callback in trainer.callbacks if isinstance(callback, Doctor)]
        # Two would see what the other one tries out.
        if self._is_done or self is not doctors[-1] or (is_rehearsing() and not self.watches_copies):
            return
        others = not trainer.is_global_zero
        self._watch = Watch(
            trainer.strategy.root_device, self.steps, self.warmup, self.out is not None, only_times=others
        )
        self._watch.models.append(pl_module)
        self._patches = TrainerPatches(trainer, self._watch, self)
        self._patches.install()
        if not others:
            self._watch.sampler.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the first one after the end of a step, which is when the next batch is requested."""
        if self._watch is not None and self._watch.has_ended:
            self._finish()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: validation is timed by itself."""
        if self._patches is not None:
            self._patches.pause()
            self._validation_began = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the end of a validation."""
        if self._watch is not None:
            self._watch.note_action("validation", perf_counter() - self._validation_began)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: what comes before the next batch belongs to no step."""
        if self._patches is not None:
            self._patches.pause()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the run ended before all steps were watched."""
        if self._watch is not None:
            self._finish()

    @needs_an_object
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: restore everything, and report nothing about a run that failed."""
        if self._watch is not None:
            self._close()

    def _finish(self) -> None:
        self._is_done = True
        watch = self._close()
        watch.compare_ranks()
        if rank_here() == 0:
            self.diagnosis = diagnose(watch, self.machine)
            self.on_diagnosis(self.diagnosis)

    def on_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Print and save the diagnosis; subclasses may do something else with it."""
        if self.show:
            show(diagnosis)
        if self.out is not None:
            save_diagnosis(diagnosis, Path(self.out))

    def __getstate__(self) -> dict[str, Any]:  # copies are made of the settings, never of what is watched
        return {**vars(self), "_watch": None, "_patches": None}

    def _close(self) -> Watch:
        assert self._watch is not None
        watch, self._watch = self._watch, None
        if self._patches is not None:
            self._patches.close()
            self._patches = None
        watch.close()
        return watch


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis on the terminal."""
    diagnosis.as_table().print()
