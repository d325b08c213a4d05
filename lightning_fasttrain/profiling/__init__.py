"""Measure a run: time and throughput of its steps, its memory over time, and the noise of its gradients.

From the bottom up: ``memory_record``, ``memory_meter``, ``memory_timeline``, ``gradient_noise_scale``,
``step_meter``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.device import peak_flops
    from lightning_fasttrain.core.peak_memory import PeakMemory
    from lightning_fasttrain.profiling.gradient_noise_scale import GradientNoiseScale, NoiseScale, split_gradient_noise
    from lightning_fasttrain.profiling.memory_meter import MemoryMeter
    from lightning_fasttrain.profiling.memory_record import MemoryRecord, draw_memory, save_memory_record
    from lightning_fasttrain.profiling.memory_timeline import MemoryRecording, MemoryTimeline
    from lightning_fasttrain.profiling.step_meter import StepMeter, StepTimer, compare_ranks

__all__ = [
    "GradientNoiseScale",
    "MemoryMeter",
    "MemoryRecord",
    "MemoryRecording",
    "MemoryTimeline",
    "NoiseScale",
    "PeakMemory",
    "StepMeter",
    "StepTimer",
    "compare_ranks",
    "draw_memory",
    "peak_flops",
    "save_memory_record",
    "split_gradient_noise",
]
