"""The base class of all techniques, and what a technique declares about itself.

A technique bases its advice on :class:`Facts` and describes its effect on memory in a :class:`PredictedStep`.

From the bottom up: ``declarations``, ``run_summary``, ``technique``, ``run_length``, ``duration``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.technique.declarations import (
        Capability,
        Conflict,
        Exactness,
        Facts,
        PredictedStep,
        Setting,
        Surgery,
    )
    from lightning_fasttrain.technique.technique import Technique, apply, check_together

__all__ = [
    "Capability",
    "Conflict",
    "Exactness",
    "Facts",
    "PredictedStep",
    "Setting",
    "Surgery",
    "Technique",
    "apply",
    "check_together",
]
