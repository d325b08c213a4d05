"""Techniques that change the nn.Module before the optimizer exists.

Activations that blocks save for the backward are recomputed or offloaded; blocks are compiled, or multiply in 8 bits.

From the bottom up: ``_stored_bytes``, ``checkpoint_savings``, ``eight_bit_products``, ``matmul_precision``,
``offloaded_tensors``, ``checkpointed_forward``, ``low_precision_products``, ``activation_offload``,
``activation_checkpointing``, ``compile``, ``memory_budget``.
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
    from lightning_fasttrain.model.compile.compile_blocks import CompileBlocks, compile_blocks_
    from lightning_fasttrain.model.compile.compile_report import (
        CompileReport,
        CompileWatch,
        load_compile_cache,
        save_compile_cache,
    )
    from lightning_fasttrain.model.low_precision_products import (
        LowPrecisionProducts,
        LowPrecisionReport,
        multiply_in_low_precision_,
    )
    from lightning_fasttrain.model.matmul_precision import MatmulPrecision, matmul_precision_
    from lightning_fasttrain.model.memory_budget.checkpoint_plan import BlockPlan, CheckpointPlan
    from lightning_fasttrain.model.memory_budget.memory_budget import MemoryBudget

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "BlockPlan",
    "CheckpointPlan",
    "CheckpointPolicy",
    "CompileBlocks",
    "CompileReport",
    "CompileWatch",
    "EveryBlock",
    "LowPrecisionProducts",
    "LowPrecisionReport",
    "MatmulPrecision",
    "MemoryBudget",
    "SelectiveOps",
    "checkpoint_activations_",
    "compile_blocks_",
    "find_blocks",
    "load_compile_cache",
    "matmul_precision_",
    "multiply_in_low_precision_",
    "offload_activations",
    "save_compile_cache",
]
