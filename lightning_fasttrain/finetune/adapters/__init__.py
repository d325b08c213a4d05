"""Add small trainable layers beside frozen ones, and unload or merge them.

The layers are PEFT's.

From the bottom up: ``initializations``, ``adapter_checks``, ``add_adapter``, ``adapter_checkpoints``,
``merge_quantized``, ``lora``, ``merge``, ``qlora``, ``base_model``.
"""
