"""Predicts and chooses before anything is allocated, or from the first steps.

``predict`` looks ahead, ``budget`` keeps a limit, ``proof`` shows that training is the same, ``rehearsal`` tries out
what will be done later, ``advice`` says what acts and what could.

From the bottom up: ``budget``, ``predict``, ``proof``, ``rehearsal``, ``catalogue``, ``subject``, ``advice``.
"""

from lightning_fasttrain.plan.advice.explain import explain
from lightning_fasttrain.plan.advice.unused import Unused, UnusedReport
from lightning_fasttrain.plan.advice.why_not import why_not
from lightning_fasttrain.plan.budget.checkpoint_plan import BlockPlan, CheckpointPlan
from lightning_fasttrain.plan.budget.memory_budget import MemoryBudget
from lightning_fasttrain.plan.predict.count_flops import count_flops
from lightning_fasttrain.plan.predict.memory_report import MemoryReport
from lightning_fasttrain.plan.predict.predict_memory import predict_memory
from lightning_fasttrain.plan.proof.compare_records import Distance
from lightning_fasttrain.plan.proof.report import Verification, Verified
from lightning_fasttrain.plan.proof.verify import verify
from lightning_fasttrain.plan.rehearsal.rehearsal import Rehearsal
from lightning_fasttrain.plan.rehearsal.rehearsal_report import RehearsalError, RehearsalReport

__all__ = [
    "BlockPlan",
    "CheckpointPlan",
    "Distance",
    "MemoryBudget",
    "MemoryReport",
    "Rehearsal",
    "RehearsalError",
    "RehearsalReport",
    "Unused",
    "UnusedReport",
    "Verification",
    "Verified",
    "count_flops",
    "explain",
    "predict_memory",
    "verify",
    "why_not",
]
