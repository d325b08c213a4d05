"""Frozen weights in 4 or 8 bits.

The layers are those of bitsandbytes, extended so that saving, copying and moving preserve their state.

From the bottom up: ``quantized_layer``, ``quantized_tensor``, ``quantized_base``, ``load_quantized``.
"""
