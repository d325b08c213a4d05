"""Changes the nn.Module before the optimizer exists.

What blocks save for the backward is recomputed, moved away, or never made; what they compute is compiled, or
multiplied in 8 bits.

From the bottom up: ``_stored_bytes``, ``checkpoint_savings``, ``compile_cache``, ``compile_report``,
``compiled_check``, ``known_compiler_faults``, ``activation_offload``, ``checkpointed_forward``,
``activation_checkpointing``, ``compile_blocks``, ``eight_bit_products``, ``low_precision_products``.
"""

from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.model.activation_checkpointing import (
    ActivationCheckpointing,
    CheckpointPolicy,
    EveryBlock,
    SelectiveOps,
    checkpoint_activations_,
)
from lightning_fasttrain.model.activation_offload import ActivationOffload, offload_activations
from lightning_fasttrain.model.compile_blocks import CompileBlocks, compile_blocks_
from lightning_fasttrain.model.compile_cache import load_compile_cache, save_compile_cache
from lightning_fasttrain.model.compile_report import CompileReport, CompileWatch
from lightning_fasttrain.model.low_precision_products import (
    LowPrecisionProducts,
    LowPrecisionReport,
    multiply_in_low_precision_,
)

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "CheckpointPolicy",
    "CompileBlocks",
    "CompileReport",
    "CompileWatch",
    "EveryBlock",
    "LowPrecisionProducts",
    "LowPrecisionReport",
    "SelectiveOps",
    "checkpoint_activations_",
    "compile_blocks_",
    "find_blocks",
    "load_compile_cache",
    "multiply_in_low_precision_",
    "offload_activations",
    "save_compile_cache",
]
