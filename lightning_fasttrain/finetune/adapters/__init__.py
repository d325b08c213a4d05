"""Add small trainable layers beside frozen ones, and unload or merge them.

The layers are PEFT's.

From the bottom up: ``initializations``, ``adapter_checks``, ``add_adapter``, ``adapter_checkpoints``,
``merge_quantized``, ``merge``, ``lora``, ``base_model``.
"""
