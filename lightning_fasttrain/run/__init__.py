"""Keep a run alive, and measure it: checkpoints and resuming, guards, meters and memory timelines.

From the bottom up: ``garbage_collection``, ``checkpoint``, ``guards``, ``profiling``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.device import peak_flops
    from lightning_fasttrain.core.files.checkpoint_folder import verify_checkpoint
    from lightning_fasttrain.core.files.remote_checkpoint import newest_remote_checkpoint
    from lightning_fasttrain.core.files.safe_load import CorruptCheckpoint
    from lightning_fasttrain.core.peak_memory import PeakMemory
    from lightning_fasttrain.core.state.rng import random_state, set_random_state
    from lightning_fasttrain.run.checkpoint.atomic_checkpoints import (
        AtomicCheckpointIO,
        AtomicCheckpoints,
        BackgroundCheckpointIO,
    )
    from lightning_fasttrain.run.checkpoint.exact_resume import ExactResume
    from lightning_fasttrain.run.checkpoint.loaders.resumable_loader import ResumableLoader, resumable
    from lightning_fasttrain.run.garbage_collection import GarbageCollection, freeze_survivors
    from lightning_fasttrain.run.guards.finite_guard import FiniteGuard, FiniteSteps, refuse_unfinite
    from lightning_fasttrain.run.guards.hang_watch import HangWatch
    from lightning_fasttrain.run.guards.preemption import Preemption, PreemptionFlag
    from lightning_fasttrain.run.guards.spike_guard import SpikeGuard, SteadySteps
    from lightning_fasttrain.run.guards.watchdog import ProgressWatch
    from lightning_fasttrain.run.profiling.gradient_noise_scale import GradientNoiseScale
    from lightning_fasttrain.run.profiling.memory_files import draw_memory, save_memory_record
    from lightning_fasttrain.run.profiling.memory_meter import MemoryMeter
    from lightning_fasttrain.run.profiling.memory_record import MemoryRecord
    from lightning_fasttrain.run.profiling.memory_recording import MemoryRecording
    from lightning_fasttrain.run.profiling.memory_timeline import MemoryTimeline
    from lightning_fasttrain.run.profiling.noise_scale import NoiseScale, split_gradient_noise
    from lightning_fasttrain.run.profiling.step_meter import StepMeter, compare_ranks
    from lightning_fasttrain.run.profiling.step_timer import StepTimer

__all__ = [
    "AtomicCheckpointIO",
    "AtomicCheckpoints",
    "BackgroundCheckpointIO",
    "CorruptCheckpoint",
    "ExactResume",
    "FiniteGuard",
    "FiniteSteps",
    "GarbageCollection",
    "GradientNoiseScale",
    "HangWatch",
    "MemoryMeter",
    "MemoryRecord",
    "MemoryRecording",
    "MemoryTimeline",
    "NoiseScale",
    "PeakMemory",
    "Preemption",
    "PreemptionFlag",
    "ProgressWatch",
    "ResumableLoader",
    "SpikeGuard",
    "SteadySteps",
    "StepMeter",
    "StepTimer",
    "compare_ranks",
    "draw_memory",
    "freeze_survivors",
    "newest_remote_checkpoint",
    "peak_flops",
    "random_state",
    "refuse_unfinite",
    "resumable",
    "save_memory_record",
    "set_random_state",
    "split_gradient_noise",
    "verify_checkpoint",
]
