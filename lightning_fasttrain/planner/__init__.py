"""Chooses for a user: the fastest mix of techniques that fits a limit of memory, by measurement and prediction.

From the bottom up: ``configuration``, ``several_devices``, ``plan``, ``predicted_memory``, ``micro_batch_trial``,
``search_space``, ``suggestions``, ``timing``, ``search``, ``make_plan``, ``auto``, ``auto_batch_size``.
"""

from lightning_fasttrain.planner.auto import Auto
from lightning_fasttrain.planner.auto_batch_size import AutoBatchSize
from lightning_fasttrain.planner.configuration import Choice
from lightning_fasttrain.planner.make_plan import make_plan
from lightning_fasttrain.planner.plan import Plan, Tried

__all__ = [
    "Auto",
    "AutoBatchSize",
    "Choice",
    "Plan",
    "Tried",
    "make_plan",
]
