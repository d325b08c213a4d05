"""Choose the fastest combination of techniques that fits a memory limit, and explain what acts on a run.

From the bottom up: ``catalogue``, ``advice``, ``candidates``, ``several_devices``, ``timing``,
``plan``, ``search``, ``make_plan``, ``auto``, ``auto_batch_size``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.planner.advice.explain import explain
    from lightning_fasttrain.planner.advice.why_not import Unused, UnusedReport, why_not
    from lightning_fasttrain.planner.auto import Auto
    from lightning_fasttrain.planner.auto_batch_size import AutoBatchSize
    from lightning_fasttrain.planner.candidates import Choice
    from lightning_fasttrain.planner.make_plan import make_plan
    from lightning_fasttrain.planner.plan import Plan, Tried

__all__ = [
    "Auto",
    "AutoBatchSize",
    "Choice",
    "Plan",
    "Tried",
    "Unused",
    "UnusedReport",
    "explain",
    "make_plan",
    "why_not",
]
