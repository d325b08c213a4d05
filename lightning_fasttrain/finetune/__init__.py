"""Decides which parameters exist and train, and how the frozen rest is kept."""

from lightning_fasttrain.finetune.adapter_checkpoints import trained_names, trained_state
from lightning_fasttrain.finetune.adapters import (
    adapter_names,
    add_adapter_,
    base_model,
    enable_adapters_,
    use_adapter_,
)
from lightning_fasttrain.finetune.base_fingerprint import base_fingerprint
from lightning_fasttrain.finetune.freezing import freeze_, freeze_except_, thaw_
from lightning_fasttrain.finetune.lora import IA3, Adapter, LoRA
from lightning_fasttrain.finetune.targets import find_heads, find_targets
