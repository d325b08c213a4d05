"""Tune a script in its own process, on copies of its run, and end the process."""

import copy
import functools
import json
import os
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_fasttrain.cli.rehearsal.rehearsed_script import RehearseAndEnd, end_script
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, end_process
from lightning_fasttrain.cli.tuning.advice import Advice
from lightning_fasttrain.cli.tuning.make_advice import SHARES, Tuning, with_diagnosis
from lightning_fasttrain.cli.tuning.tune import TUNE
from lightning_fasttrain.cli.tuning.tuned_loop import TunedLoop
from lightning_fasttrain.core.host.lightning import training_loader
from lightning_fasttrain.core.messages import describe_error
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor import Diagnosis, Doctor
from lightning_fasttrain.planner.auto import count_batches
from lightning_fasttrain.planner.timing import Stopwatch
from lightning_fasttrain.proof.rehearsal.context import RehearsalError, read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsing, is_rehearsing
from lightning_fasttrain.proof.rehearsal.run_copy import RunCopy, leaving_no_trace, one_device_again
from lightning_fasttrain.proof.rehearsal.stages import verify_run
from lightning_fasttrain.proof.verification.short_run import EnoughError, quietly

_WATCHED, _WARMUP = 20, 2  # steps that the doctor watches; fewer of long ones


def make_callbacks() -> list[L.Callback]:
    """Return the callback that Lightning adds to each Trainer of the script, through its entry points."""
    if is_rehearsing() or RESULT not in os.environ:
        return []
    _write_no_logs()
    return [TuneAndEnd(**json.loads(os.environ[TUNE]))]


class _NoLogger(DummyLogger):
    """Logs nothing; what asks for its folder gets one that is removed with the command's result."""

    @property
    def save_dir(self) -> str:
        return str(Path(os.environ[RESULT]).parent / "logs")


@functools.cache
def _write_no_logs() -> None:
    """Have Trainers fit without their loggers, which create folders before any callback is called."""
    original = L.Trainer.fit

    @functools.wraps(original)
    def fit(trainer: L.Trainer, *arguments: Any, **named: Any) -> Any:
        if trainer.loggers:
            trainer.loggers = [_NoLogger()]
        return original(trainer, *arguments, **named)

    patch(L.Trainer, "fit", fit)


def run_tuned() -> None:
    """Run the script that ``sys.argv`` names; a loop of its own is watched until a Trainer fits, if one does."""
    sys.argv = sys.argv[1:]
    script = str(Path(sys.argv[0]).resolve())
    sys.path[0] = str(Path(script).parent)
    loop = TunedLoop(**json.loads(os.environ[TUNE]))
    with loop.examination:
        runpy.run_path(script, run_name="__main__")


class WatchCopy(Doctor):
    """A doctor of a copy of the run, which ends it with the diagnosis; of long steps it watches fewer."""

    watches_copies: ClassVar[bool] = True

    def __init__(self, seconds: float) -> None:
        super().__init__(_WATCHED, _WARMUP, show=False)
        self.seconds = seconds
        self._began = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._watch is not None and self._watch.done == _WARMUP:
            a_step = (time.monotonic() - self._began) / _WARMUP
            self._watch.steps = max(6, min(_WATCHED, int(self.seconds / a_step)))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_diagnosis(self, diagnosis: Diagnosis) -> None:
        raise EnoughError


def watch_copy(trainer: L.Trainer, run: RunCopy, seconds: float) -> Diagnosis | None:
    """Run a copy of the run on its own loader with a doctor; returns the diagnosis, None if it was too short."""
    doctor = WatchCopy(seconds)
    silent = copy.copy(run)
    silent.settings = {**run.settings, "enable_checkpointing": False}
    silent.fit(training_loader(trainer), [], doctor, one_device_again(trainer))
    return doctor.diagnosis


class TuneAndEnd(RehearseAndEnd):
    """Tunes the run on copies of it, after which the process ends.

    Args:
        memory, keep, seconds: as in the environment.
    """

    def __init__(self, memory: str, keep: str, seconds: float) -> None:
        super().__init__()
        self.orders = memory, keep, seconds

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: a Trainer trains, so the script has no loop of its own; a Tuner's steps come before the run's."""
        if stage == "fit":
            for loop in TunedLoop.running:
                loop.examination.cancel()
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: watch, plan and verify, and end the process."""
        ranks = trainer.world_size
        if not trainer.is_global_zero:
            end_process(0, for_all=False)
        if dist.is_initialized():
            dist.destroy_process_group()  # the others have ended, and nothing may wait for them
        try:
            with Rehearsing(), leaving_no_trace(trainer, pl_module):
                advice = self._advise(trainer, pl_module, Tuning.ordered(*self.orders))
        except (RehearsalError, ValueError, TypeError) as error:
            end_script(True, {"ok": False, "error": str(error)})
        except Exception as error:
            end_script(True, {"ok": False, "error": f"the step fails on a copy of the model: {describe_error(error)}"})
        if ranks > 1:
            alone = f"Measured on one of {ranks} ranks alone, without the exchange of gradients"
            advice.notes.append(f"{alone}: together they gain less.")
        end_script(True, {"ok": True, "advice": asdict(advice)})

    def _advise(self, trainer: L.Trainer, pl_module: L.LightningModule, tuning: Tuning) -> Advice:
        run, loader = self._run, training_loader(trainer)
        assert run is not None
        tuning.progress.say("reading batches")
        run.share_equal_weights(pl_module)
        sample, validation = read_batches(trainer, 2, seconds=0.0)
        seen = "it ended too early"
        diagnosis: Diagnosis | None = None
        tuning.progress.say("watching some steps of a copy of the run")
        try:
            diagnosis = watch_copy(trainer, run, SHARES["doctor"] * tuning.seconds)
        except Exception as error:
            seen = describe_error(error)
        clipping = {name: value for name, value in run.settings.items() if name.startswith("gradient_clip")}
        device = trainer.strategy.root_device.type
        with run.module_with_transfer_hooks() as module, quietly():
            advice = tuning.advise(
                Stopwatch(module, sample.first[0], {"accelerator": device, **clipping}),
                str(trainer.precision),
                count_batches(trainer, loader),
                loader,
                lambda techniques: verify_run(trainer, run, sample.first, validation, techniques),
            )
        advice.replaced.extend(type(technique).__name__ for technique in run.techniques)
        if diagnosis is None:
            advice.notes.append(f"What the time of a step goes to was not seen: {seen}.")
            return advice
        return with_diagnosis(advice, diagnosis)
