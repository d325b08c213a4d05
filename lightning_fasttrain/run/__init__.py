"""Keeps a run going, and measures it.

The two meters are here; what they and others need in ``memory``, ``resume``, ``guard`` and ``steady``.

From the bottom up: ``_quantized_bytes``, ``guard``, ``matmul_precision``, ``resume``, ``steady``, ``slow_ranks``,
``peak_flops``, ``step_timer``, ``step_meter``, ``memory_meter``, ``memory``.
"""

from lightning_fasttrain.core.files.checkpoint_folder import verify_checkpoint
from lightning_fasttrain.core.files.safe_load import CorruptCheckpoint
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.run.guard.atomic_checkpoints import AtomicCheckpointIO, AtomicCheckpoints
from lightning_fasttrain.run.guard.hang_watch import HangWatch
from lightning_fasttrain.run.guard.preemption import Preemption
from lightning_fasttrain.run.guard.preemption_flag import PreemptionFlag
from lightning_fasttrain.run.guard.watchdog import ProgressWatch
from lightning_fasttrain.run.matmul_precision import MatmulPrecision, matmul_precision_
from lightning_fasttrain.run.memory.memory_files import draw_memory, save_memory_record
from lightning_fasttrain.run.memory.memory_record import MemoryRecord
from lightning_fasttrain.run.memory.memory_recording import MemoryRecording
from lightning_fasttrain.run.memory.memory_timeline import MemoryTimeline
from lightning_fasttrain.run.memory_meter import MemoryMeter, PeakMemory
from lightning_fasttrain.run.peak_flops import peak_flops
from lightning_fasttrain.run.resume.exact_resume import ExactResume
from lightning_fasttrain.run.resume.resumable_loader import ResumableLoader, resumable
from lightning_fasttrain.run.slow_ranks import compare_ranks
from lightning_fasttrain.run.steady.finite_guard import FiniteGuard, FiniteSteps, refuse_unfinite
from lightning_fasttrain.run.steady.spike_guard import SpikeGuard, SteadySteps
from lightning_fasttrain.run.step_meter import StepMeter
from lightning_fasttrain.run.step_timer import StepTimer

__all__ = [
    "AtomicCheckpointIO",
    "AtomicCheckpoints",
    "CorruptCheckpoint",
    "ExactResume",
    "FiniteGuard",
    "FiniteSteps",
    "HangWatch",
    "MatmulPrecision",
    "MemoryMeter",
    "MemoryRecord",
    "MemoryRecording",
    "MemoryTimeline",
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
    "matmul_precision_",
    "peak_flops",
    "random_state",
    "refuse_unfinite",
    "resumable",
    "save_memory_record",
    "set_random_state",
    "verify_checkpoint",
]
