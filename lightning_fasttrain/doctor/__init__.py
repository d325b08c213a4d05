"""Watch a user's own training for a few steps, and say what it wastes: measured, with the line and the cure.

From the bottom up: ``observation``, ``diagnosis``, ``findings``, ``diagnose``, ``page``, ``doctor``, ``examine``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.doctor.diagnosis import Cost, Diagnosis, Finding
    from lightning_fasttrain.doctor.doctor import Doctor
    from lightning_fasttrain.doctor.examine import Examination, examine
    from lightning_fasttrain.doctor.observation.source_lines import SourceLine
    from lightning_fasttrain.doctor.page import save_diagnosis

__all__ = ["Cost", "Diagnosis", "Doctor", "Examination", "Finding", "SourceLine", "examine", "save_diagnosis"]
