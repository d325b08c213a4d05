"""Add small trainable layers beside frozen ones, and unload or merge them.

The layers are PEFT's.

From the bottom up: ``_adapter_checks``, ``fast_path_weights``, ``initializations``, ``add_adapter``,
``_merged_layers``, ``adapter_checkpoints``, ``merge_quantized``, ``lora``, ``merge``, ``qlora``, ``base_model``.
"""
