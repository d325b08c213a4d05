"""Fine-tuning: which parameters exist and train, and how the frozen weights are stored.

Each subpackage imports only those listed before it.

From the bottom up: ``selection``, ``frozen_cache``, ``quantized``, ``adapters``, ``account_bytes``, ``prompt_tuning``,
``files``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.modules.heads import find_heads
    from lightning_fasttrain.core.modules.parameters import count_parameters
    from lightning_fasttrain.finetune.account_bytes import ByteAccount, account_bytes
    from lightning_fasttrain.finetune.adapters.adapter_checkpoints import (
        load_trained_state_,
        trained_names,
        trained_state,
    )
    from lightning_fasttrain.finetune.adapters.add_adapter import (
        adapter_names,
        add_adapter_,
        remove_adapter_,
        use_adapter_,
    )
    from lightning_fasttrain.finetune.adapters.base_model import base_model, enable_adapters_, unload_adapters_
    from lightning_fasttrain.finetune.adapters.lora import IA3, Adapter, LoRA, QLoRA
    from lightning_fasttrain.finetune.adapters.merge import MergeReport, merge_adapters_, unmerge_adapters_
    from lightning_fasttrain.finetune.files.adapter_files import load_adapter_, save_adapter
    from lightning_fasttrain.finetune.files.export_model import export_model
    from lightning_fasttrain.finetune.frozen_cache import FrozenCache, cache_frozen_
    from lightning_fasttrain.finetune.prompt_tuning import PrefixTuning, PromptTuning, add_prompt_
    from lightning_fasttrain.finetune.quantized.load_quantized import load_quantized
    from lightning_fasttrain.finetune.quantized.quantized_base import QuantizedBase, QuantizedReport, quantize_base_
    from lightning_fasttrain.finetune.quantized.quantized_layer import dequantized_weight, quantized_bytes
    from lightning_fasttrain.finetune.quantized.quantized_tensor import keep_quantized_
    from lightning_fasttrain.finetune.selection.base_fingerprint import base_fingerprint
    from lightning_fasttrain.finetune.selection.freezing import freeze_, freeze_except_, unfreeze_
    from lightning_fasttrain.finetune.selection.gradual_unfreezing import GradualUnfreezing, Unfreezing
    from lightning_fasttrain.finetune.selection.swap_head import swap_head_
    from lightning_fasttrain.finetune.selection.targets import find_targets

__all__ = [
    "IA3",
    "Adapter",
    "ByteAccount",
    "FrozenCache",
    "GradualUnfreezing",
    "LoRA",
    "MergeReport",
    "PrefixTuning",
    "PromptTuning",
    "QLoRA",
    "QuantizedBase",
    "QuantizedReport",
    "Unfreezing",
    "account_bytes",
    "adapter_names",
    "add_adapter_",
    "add_prompt_",
    "base_fingerprint",
    "base_model",
    "cache_frozen_",
    "count_parameters",
    "dequantized_weight",
    "enable_adapters_",
    "export_model",
    "find_heads",
    "find_targets",
    "freeze_",
    "freeze_except_",
    "keep_quantized_",
    "load_adapter_",
    "load_quantized",
    "load_trained_state_",
    "merge_adapters_",
    "quantize_base_",
    "quantized_bytes",
    "remove_adapter_",
    "save_adapter",
    "swap_head_",
    "trained_names",
    "trained_state",
    "unfreeze_",
    "unload_adapters_",
    "unmerge_adapters_",
    "use_adapter_",
]
