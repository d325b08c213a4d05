"""What a technique is, and what it says about itself.

All rooms build on this one. What a technique is asked about is a :class:`Facts`, and what it predicts for is a
:class:`PredictedStep`.

From the bottom up: ``arguments``, ``declarations``, ``duration``, ``explanation``, ``facts``, ``predicted_step``,
``run_summary``, ``technique``, ``run_length``.
"""

from lightning_fasttrain.technique.declarations import Capability, Conflict, Exactness, Setting, Surgery
from lightning_fasttrain.technique.facts import Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep
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
