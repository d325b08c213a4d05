"""Keeps frozen weights in 4 or 8 bits.

The layers are bitsandbytes', and what these lose in saving, copying and moving is kept.

From the bottom up: ``_flat_forward``, ``_tensor_files``, ``_quantized_layer``, ``_quantizable``,
``quantized_state``, ``_quantized_tensor``, ``_held_adapters``, ``quantized_base``, ``load_quantized``.
"""
