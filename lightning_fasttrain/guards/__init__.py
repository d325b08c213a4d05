"""Guard a run against non-finite steps, loss spikes, hangs, preemption and pauses of the garbage collector.

From the bottom up: ``garbage_collection``, ``hang_watch``, ``step_guard``, ``finite_guard``, ``spike_guard``,
``preemption``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.guards.finite_guard import FiniteGuard, FiniteSteps, refuse_unfinite
    from lightning_fasttrain.guards.garbage_collection import GarbageCollection, freeze_survivors
    from lightning_fasttrain.guards.hang_watch import HangWatch, ProgressWatch
    from lightning_fasttrain.guards.preemption import Preemption, PreemptionFlag
    from lightning_fasttrain.guards.spike_guard import SpikeGuard, SteadySteps

__all__ = [
    "FiniteGuard",
    "FiniteSteps",
    "GarbageCollection",
    "HangWatch",
    "Preemption",
    "PreemptionFlag",
    "ProgressWatch",
    "SpikeGuard",
    "SteadySteps",
    "freeze_survivors",
    "refuse_unfinite",
]
