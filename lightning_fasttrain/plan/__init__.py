"""Predicts, searches and explains, with all that the rooms offer."""

from lightning_fasttrain.plan.checkpoint_plan import BlockPlan, CheckpointPlan
from lightning_fasttrain.plan.memory_budget import MemoryBudget
from lightning_fasttrain.plan.memory_report import MemoryReport
from lightning_fasttrain.plan.predict_memory import predict_memory
