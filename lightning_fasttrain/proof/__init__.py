"""Run a few steps on copies, to check that techniques keep training the same and that the run will not fail later.

``verification`` compares steps with and without techniques; ``rehearsal`` tries checkpoints, resuming, validation
and the largest batch.

From the bottom up: ``verification``, ``rehearsal``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.proof.rehearsal.context import RehearsalError, RehearsalReport
    from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsal
    from lightning_fasttrain.proof.verification.compare_records import Distance
    from lightning_fasttrain.proof.verification.report import Verification, Verified
    from lightning_fasttrain.proof.verification.verify import verify

__all__ = [
    "Distance",
    "Rehearsal",
    "RehearsalError",
    "RehearsalReport",
    "Verification",
    "Verified",
    "verify",
]
