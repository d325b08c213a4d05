"""Predicts and chooses before anything is allocated, or from the first steps.

``predict`` looks ahead, ``budget`` keeps a limit.

From the bottom up: ``budget``, ``predict``, ``subject``.
"""

from lightning_fasttrain.plan.budget.checkpoint_plan import BlockPlan, CheckpointPlan
from lightning_fasttrain.plan.budget.memory_budget import MemoryBudget
from lightning_fasttrain.plan.predict.memory_report import MemoryReport
from lightning_fasttrain.plan.predict.predict_memory import predict_memory
