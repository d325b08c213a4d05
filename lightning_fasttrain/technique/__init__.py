"""What a technique is, and what it says about itself.

All rooms build on this one. What a technique is asked about is a :class:`Facts`, and what it predicts for is a
:class:`PredictedStep`.

From the bottom up: ``declarations``, ``arguments``, ``batch_watch``, ``explanation``, ``facts``, ``predicted_step``,
``run_report``, ``technique``.
"""

from lightning_fasttrain.technique.declarations import Conflict, Exactness, Setting, Surgery
from lightning_fasttrain.technique.facts import Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep
from lightning_fasttrain.technique.technique import Technique, apply, check_together

__all__ = [
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
