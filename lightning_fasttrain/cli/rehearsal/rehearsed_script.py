"""Callbacks of a script that is rehearsed or verified, which end its process."""

import json
import os
from collections.abc import Callable, Mapping
from typing import NoReturn

import lightning as L

from lightning_fasttrain.cli.rehearsal.run_script import RESULT, SECONDS, VERIFY, end_process
from lightning_fasttrain.cli.subject import techniques_named
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import say
from lightning_fasttrain.proof.rehearsal.context import RehearsalError, RehearsalReport, read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsal, Rehearsing, is_rehearsing
from lightning_fasttrain.proof.rehearsal.run_copy import leaving_no_trace
from lightning_fasttrain.proof.rehearsal.stages import verify_run


def make_callbacks() -> list[L.Callback]:
    """Return the callbacks that Lightning adds to each Trainer, through its entry points ``callbacks_factory``.

    Nothing outside of ``fasttrain rehearse`` and ``fasttrain verify``, nor in the Trainers of a rehearsal itself.
    """
    if is_rehearsing() or RESULT not in os.environ:
        return []
    if VERIFY in os.environ:
        return [VerifyAndEnd(**json.loads(os.environ[VERIFY]))]
    return [RehearseAndEnd(float(os.environ[SECONDS]))]


class AnnouncedReport(RehearsalReport):
    """Names each stage on stderr when it is done; the command prints the whole report at the end."""

    def tell(self, stage: str, sentence: str) -> None:
        self.lines[stage] = sentence
        say("rehearsed: %s", stage)


class RehearseAndEnd(Rehearsal):
    """A rehearsal after which the process ends, without the rest of the script."""

    kind_of_report = AnnouncedReport

    def look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Named, because a lambda has no first argument from which super() could find class and object.
        self._or_end(trainer, lambda: super(RehearseAndEnd, self).look(trainer, pl_module))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: rehearse, unless the script has a rehearsal of its own, and end the process."""
        own = [one.report for one in trainer.callbacks if isinstance(one, Rehearsal) and one.report is not None]
        if own:
            self.report = own[0]
        else:
            self._or_end(trainer, lambda: super(RehearseAndEnd, self).on_train_start(trainer, pl_module))
        assert self.report is not None
        # A rank may end only when all have their report.
        trainer.strategy.barrier()
        found = {"ok": True, "report": self.report.as_dict(), "table": str(self.report)}
        end_script(trainer.is_global_zero, found)

    def _or_end(self, trainer: L.Trainer, act: Callable[[], object]) -> None:
        try:
            act()
        except RehearsalError as error:
            # Any rank reports this, since the others may be waiting for it.
            end_script(True, {"ok": False, "error": str(error)})


class VerifyAndEnd(RehearseAndEnd):
    """A verification of the first batches, in the run's precision, after which the process ends.

    Args:
        techniques: as on the command line, instead of the Trainer's own; "" for those.
        steps: as for :func:`~lightning_fasttrain.verify`.
    """

    def __init__(self, techniques: str, steps: int) -> None:
        super().__init__()
        self.techniques, self.steps = techniques, steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: verify the techniques on the first batches, and end the process."""
        run = self._run
        assert run is not None
        try:
            with Rehearsing(), leaving_no_trace(trainer, pl_module):
                techniques = techniques_named(self.techniques) or run.techniques
                sample, validation = read_batches(trainer, self.steps, seconds=0.0)
                verified = verify_run(trainer, run, sample.first, validation, techniques, self.steps)
        except (RehearsalError, ValueError, TypeError) as error:
            end_script(True, {"ok": False, "error": str(error)})
        trainer.strategy.barrier()
        found = {"ok": verified.ok, "report": verified.as_dict(), "table": str(verified)}
        end_script(trainer.is_global_zero, found)


def end_script(tells: bool, result: Mapping[str, object]) -> NoReturn:
    """End the process of a script; the rank that tells writes the result for the command."""
    if tells:
        write_atomic(os.environ[RESULT], json.dumps(result))
    end_process(0 if result["ok"] else 1, for_all=tells)
