"""Selection of parameters and layers: which are frozen, which get an adapter, which belong to the base model.

Only ``swap_head`` adds parameters.

From the bottom up: ``base_fingerprint``, ``freezing``, ``swap_head``, ``gradual_unfreezing``, ``targets``,
``float32_adapters``.
"""
