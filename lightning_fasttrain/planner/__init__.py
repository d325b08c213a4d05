"""Choose the fastest combination of techniques that fits a memory limit, and explain what acts on a run.

From the bottom up: ``candidates``, ``timing``, ``plan``, ``search``, ``make_plan``, ``auto``, ``auto_batch_size``,
``why_not``, ``explain``, ``cluster_plan``, ``predict_layout``, ``plan_cluster``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.planner.auto import Auto
    from lightning_fasttrain.planner.auto_batch_size import AutoBatchSize
    from lightning_fasttrain.planner.candidates import Choice
    from lightning_fasttrain.planner.cluster_plan import ClusterPlan, Layout, PlannedLayout
    from lightning_fasttrain.planner.explain import explain
    from lightning_fasttrain.planner.make_plan import make_plan
    from lightning_fasttrain.planner.plan import Plan, Tried
    from lightning_fasttrain.planner.plan_cluster import plan_cluster
    from lightning_fasttrain.planner.why_not import Unused, UnusedReport, why_not

__all__ = [
    "Auto",
    "AutoBatchSize",
    "Choice",
    "ClusterPlan",
    "Layout",
    "Plan",
    "PlannedLayout",
    "Tried",
    "Unused",
    "UnusedReport",
    "explain",
    "make_plan",
    "plan_cluster",
    "why_not",
]
