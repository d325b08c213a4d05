"""Puts small trainable layers beside frozen ones, and takes them out again or merges them.

The layers are PEFT's.

From the bottom up: ``_adapter_checks``, ``_direct_weight_use``, ``_starts``, ``add_adapter``,
``_merged_layers``, ``adapter_checkpoints``, ``base_model``, ``combine_adapters``,
``merge_quantized``, ``lora``, ``merge``, ``qlora``.
"""
