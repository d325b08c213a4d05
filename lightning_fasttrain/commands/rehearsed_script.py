"""In a script that is rehearsed: the callback that every Trainer of it gets, and that ends the process."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain.plan.rehearsal.rehearsal import Rehearsal, is_rehearsing
from lightning_fasttrain.plan.rehearsal.rehearsal_report import RehearsalError

RESULT, SECONDS = "FASTTRAIN_REHEARSAL_RESULT", "FASTTRAIN_REHEARSAL_SECONDS"  # in the environment


def make_callbacks() -> list[L.Callback]:
    """What Lightning adds to each Trainer: it asks the entry points of its group ``callbacks_factory``.

    Nothing outside of ``fasttrain rehearse``, nor in the Trainers of a rehearsal itself.
    """
    if is_rehearsing() or RESULT not in os.environ:
        return []
    return [RehearseAndEnd(float(os.environ[SECONDS]))]


class RehearseAndEnd(Rehearsal):
    """A rehearsal after which the process ends, with nothing of the script done any more."""

    def look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Named, because a lambda has no first argument from which super() could tell class and object.
        self._or_end(trainer, lambda: super(RehearseAndEnd, self).look(trainer, pl_module))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: see :class:`Rehearsal`. One that the script has itself is not done twice."""
        own = [one.report for one in trainer.callbacks if isinstance(one, Rehearsal) and one.report is not None]
        if own:
            self.report = own[0]
        else:
            self._or_end(trainer, lambda: super(RehearseAndEnd, self).on_train_start(trainer, pl_module))
        assert self.report is not None
        trainer.strategy.barrier()  # every rank has its report; then all may end
        _end(trainer.is_global_zero, {"ok": True, "report": self.report.as_dict()})

    def _or_end(self, trainer: L.Trainer, act: Callable[[], Any]) -> None:
        try:
            act()
        except RehearsalError as error:
            _end(True, {"ok": False, "error": str(error)})  # whichever rank: the others may wait for it


def _end(tells: bool, result: dict[str, Any]) -> None:
    if tells:
        write_atomic(os.environ[RESULT], json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result["ok"] else 1)  # neither what the script does after fit, nor what it does at its end
