"""Frozen weights in 4 or 8 bits.

The layers are those of bitsandbytes, extended so that saving, copying and moving preserve their state.

From the bottom up: ``quantized_layer``, ``quantized_state``, ``quantized_tensor``, ``quantized_base``,
``tensor_files``, ``load_quantized``.
"""
