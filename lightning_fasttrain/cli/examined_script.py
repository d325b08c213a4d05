"""Run a user's script in this process with the doctor watching it: its first Trainer, or its own training loop."""

import json
import os
import runpy
import sys
from pathlib import Path

import lightning as L

from lightning_fasttrain.cli.rehearsal.run_script import RESULT, end_process
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.doctor import Diagnosis, Doctor, Examination, examine

# In the environment of the script: the arguments of the doctor, as JSON.
DOCTOR = "FASTTRAIN_DOCTOR"
# What a new process runs, with the script and its arguments after it.
START = "from lightning_fasttrain.cli.examined_script import run_examined; run_examined()"

_examinations: list[Examination] = []


def make_callbacks() -> list[L.Callback]:
    """Return the callbacks that Lightning adds to each Trainer, through its entry points ``callbacks_factory``."""
    if DOCTOR not in os.environ:
        return []
    orders = json.loads(os.environ[DOCTOR])
    return [ExamineAndEnd(**orders, show=False)]


class ExamineAndEnd(Doctor):
    """A doctor after whose diagnosis the process ends, without the rest of the script."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: a Trainer trains, so the script has no loop of its own; a Tuner's steps come before the run's."""
        if stage == "fit":
            for examination in _examinations:
                examination.cancel()
        super().setup(trainer, pl_module, stage)

    def on_diagnosis(self, diagnosis: Diagnosis) -> None:
        super().on_diagnosis(diagnosis)
        _report_and_end(diagnosis)


def run_examined() -> None:
    """Run the script that ``sys.argv`` names, until its steps are watched or it ends."""
    sys.argv = sys.argv[1:]
    script = str(Path(sys.argv[0]).resolve())
    sys.path[0] = str(Path(script).parent)
    orders = json.loads(os.environ[DOCTOR])
    examination = examine(**orders, report=_report_and_end)
    _examinations.append(examination)
    with examination:
        runpy.run_path(script, run_name="__main__")


def _report_and_end(diagnosis: Diagnosis) -> None:
    folder = json.loads(os.environ[DOCTOR])["out"]
    written = [str(path) for path in sorted(Path(folder).glob("doctor.*"))]
    found = {"report": diagnosis.as_dict(), "table": str(diagnosis), "written": written}
    write_atomic(os.environ[RESULT], json.dumps(found))
    end_process(0)
