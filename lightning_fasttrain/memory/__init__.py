"""Predict the memory and the FLOPs of a training step before anything is allocated.

The step runs on tensors with shapes but without memory. Workspace of kernels is added where its size is known.

From the bottom up: ``fake_operators``, ``allocation_trace``, ``kernel_flops``, ``caching_allocator``, ``fake_step``,
``kernel_workspace``, ``memory_report``, ``one_rank``, ``cuda_kernels``, ``predict_memory``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.memory.memory_report import MemoryReport
    from lightning_fasttrain.memory.predict_memory import count_flops, predict_memory

__all__ = [
    "MemoryReport",
    "count_flops",
    "predict_memory",
]
