"""Keeps frozen weights in 4 or 8 bits.

The layers are bitsandbytes', and what these lose in saving, copying and moving is kept.

From the bottom up: ``_tensor_files``, ``unaligned_matmul``, ``_quantized_layer``, ``_quantizable``,
``quantized_state``, ``_quantized_tensor``, ``quantized_base``, ``load_quantized``, ``expert_adapters``.
"""
