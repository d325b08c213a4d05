"""Changes the nn.Module before the optimizer exists."""

from lightning_fasttrain.model.activation_checkpointing import (
    ActivationCheckpointing,
    checkpoint_activations_,
)
from lightning_fasttrain.model.compile_blocks import (
    CompileBlocks,
    CompileReport,
    CompileWatch,
    compile_blocks_,
    load_compile_cache,
    save_compile_cache,
)
