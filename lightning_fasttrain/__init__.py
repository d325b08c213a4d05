"""Train PyTorch Lightning models faster and in less memory, with proof that it is the same training."""

from lightning_fasttrain._checks import refuse_compromised_hosts

refuse_compromised_hosts()  # before anything imports lightning

from lightning_fasttrain._checkpoint_folder import (  # noqa: E402
    CorruptCheckpoint,
    newest_checkpoint,
    verify_checkpoint,
)
from lightning_fasttrain._messages import FastTrainWarning  # noqa: E402
from lightning_fasttrain._surgery import find_blocks  # noqa: E402
from lightning_fasttrain._technique import CONFLICTS, Exactness, Surgery, Technique, apply  # noqa: E402
from lightning_fasttrain.data import (  # noqa: E402
    DevicePrefetch,
    MicroBatching,
    TokenWeightedAccumulation,
    accumulate_gradients,
    accumulate_window,
    count_next_tokens,
    count_targets,
    prefetch_to_device,
    split_batch,
    split_until_it_fits,
)
from lightning_fasttrain.finetune import (  # noqa: E402
    IA3,
    Adapter,
    GradualUnfreezing,
    LoRA,
    MergeReport,
    PrefixTuning,
    PromptTuning,
    QLoRA,
    QuantizedBase,
    QuantizedReport,
    Unfreezing,
    adapter_names,
    add_adapter_,
    add_prompt_,
    base_fingerprint,
    base_model,
    count_parameters,
    dequantized_weight,
    enable_adapters_,
    find_heads,
    find_targets,
    freeze_,
    freeze_except_,
    keep_quantized_,
    load_adapter_,
    load_quantized,
    merge_adapters_,
    prompt_state,
    quantize_base_,
    quantized_bytes,
    save_adapter,
    set_prompt_state_,
    swap_head_,
    thaw_,
    trained_names,
    trained_state,
    unload_adapters_,
    unmerge_adapters_,
    use_adapter_,
)
from lightning_fasttrain.loss import (  # noqa: E402
    Distillation,
    FusedLossHead,
    distilling,
    fuse_loss_head_,
    kl_divergence,
    linear_cross_entropy,
    linear_kl_divergence,
)
from lightning_fasttrain.mixin import FastTrainMixin  # noqa: E402
from lightning_fasttrain.model import (  # noqa: E402
    ActivationCheckpointing,
    ActivationOffload,
    CheckpointPolicy,
    CompileBlocks,
    CompileReport,
    CompileWatch,
    EveryBlock,
    SelectiveOps,
    checkpoint_activations_,
    compile_blocks_,
    load_compile_cache,
    offload_activations,
    save_compile_cache,
)
from lightning_fasttrain.optim import (  # noqa: E402
    EagerGradientRelease,
    FusedClipping,
    GaLoreAdamW,
    OptimizerInBackward,
    allow_fused_clipping_,
    galore_groups,
    galore_state_bytes,
    layer_decay_groups,
    lora_plus_groups,
    optimize_in_backward_,
    release_gradients_,
)
from lightning_fasttrain.plan import BlockPlan, CheckpointPlan, MemoryBudget, MemoryReport, predict_memory  # noqa: E402
from lightning_fasttrain.run import (  # noqa: E402
    AtomicCheckpointIO,
    AtomicCheckpoints,
    MatmulPrecision,
    MemoryMeter,
    MemoryRecord,
    MemoryRecording,
    MemoryTimeline,
    PeakMemory,
    StepMeter,
    StepTimer,
    draw_memory,
    matmul_precision_,
    save_memory_record,
)
