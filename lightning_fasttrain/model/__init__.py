"""Techniques that change the nn.Module before the optimizer exists.

Activations that blocks save for the backward are recomputed or offloaded; blocks are compiled, or multiply in 8 bits.

From the bottom up: ``kernels``, ``activation_offload``, ``activation_checkpointing``, ``compile``, ``memory_budget``,
``tiled_mlp``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.modules.blocks import find_blocks
    from lightning_fasttrain.model.activation_checkpointing import (
        ActivationCheckpointing,
        CheckpointPolicy,
        EveryBlock,
        SelectiveOps,
        checkpoint_activations_,
    )
    from lightning_fasttrain.model.activation_offload import ActivationOffload, offload_activations
    from lightning_fasttrain.model.compile.compile_blocks import (
        CompileBlocks,
        CompileReport,
        CompileWatch,
        compile_blocks_,
    )
    from lightning_fasttrain.model.kernels.attention_backend import (
        AttentionBackend,
        AttentionChoice,
        attention_backend_,
    )
    from lightning_fasttrain.model.kernels.channels_last import ChannelsLast, channels_last_
    from lightning_fasttrain.model.kernels.cudnn_benchmark import CudnnBenchmark, cudnn_benchmark_
    from lightning_fasttrain.model.kernels.low_precision_products import (
        LowPrecisionProducts,
        LowPrecisionReport,
        multiply_in_low_precision_,
    )
    from lightning_fasttrain.model.kernels.matmul_precision import MatmulPrecision, matmul_precision_
    from lightning_fasttrain.model.memory_budget.checkpoint_plan import BlockPlan, CheckpointPlan
    from lightning_fasttrain.model.memory_budget.memory_budget import MemoryBudget
    from lightning_fasttrain.model.tiled_mlp import TiledMLP, tile_mlps_

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "AttentionBackend",
    "AttentionChoice",
    "BlockPlan",
    "ChannelsLast",
    "CheckpointPlan",
    "CheckpointPolicy",
    "CompileBlocks",
    "CompileReport",
    "CompileWatch",
    "CudnnBenchmark",
    "EveryBlock",
    "LowPrecisionProducts",
    "LowPrecisionReport",
    "MatmulPrecision",
    "MemoryBudget",
    "SelectiveOps",
    "TiledMLP",
    "attention_backend_",
    "channels_last_",
    "checkpoint_activations_",
    "compile_blocks_",
    "cudnn_benchmark_",
    "find_blocks",
    "matmul_precision_",
    "multiply_in_low_precision_",
    "offload_activations",
    "tile_mlps_",
]
