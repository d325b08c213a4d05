"""Decides which parameters exist and train, and how the frozen rest is kept."""

from lightning_fasttrain._heads import find_heads
from lightning_fasttrain.finetune._quantized_layer import dequantized_weight, quantized_bytes
from lightning_fasttrain.finetune.adapter_checkpoints import trained_names, trained_state
from lightning_fasttrain.finetune.adapter_files import load_adapter_, save_adapter
from lightning_fasttrain.finetune.adapters import (
    adapter_names,
    add_adapter_,
    count_parameters,
    use_adapter_,
)
from lightning_fasttrain.finetune.base_fingerprint import base_fingerprint
from lightning_fasttrain.finetune.base_model import base_model, enable_adapters_
from lightning_fasttrain.finetune.freezing import freeze_, freeze_except_, thaw_
from lightning_fasttrain.finetune.gradual_unfreezing import GradualUnfreezing, Unfreezing
from lightning_fasttrain.finetune.load_quantized import load_quantized
from lightning_fasttrain.finetune.lora import IA3, Adapter, LoRA
from lightning_fasttrain.finetune.merge import MergeReport, merge_adapters_, unload_adapters_, unmerge_adapters_
from lightning_fasttrain.finetune.prompt_tuning import PrefixTuning, PromptTuning
from lightning_fasttrain.finetune.prompts import add_prompt_, prompt_state, set_prompt_state_
from lightning_fasttrain.finetune.qlora import QLoRA
from lightning_fasttrain.finetune.quantized_base import QuantizedBase, QuantizedReport, quantize_base_
from lightning_fasttrain.finetune.quantized_state import keep_quantized_
from lightning_fasttrain.finetune.swap_head import swap_head_
from lightning_fasttrain.finetune.targets import find_targets
