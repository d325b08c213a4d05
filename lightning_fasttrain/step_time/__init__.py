"""Predict the time of a training step on devices that are not at hand.

From the bottom up: ``accelerators``, ``machine``, ``record_step``, ``simulate_step``, ``add_collectives``,
``predict_time``, ``measure_machine``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.step_time.machine import Link, Machine, read_machine
    from lightning_fasttrain.step_time.measure_machine import measure_machine
    from lightning_fasttrain.step_time.predict_time import TimeReport, predict_time

__all__ = [
    "Link",
    "Machine",
    "TimeReport",
    "measure_machine",
    "predict_time",
    "read_machine",
]
