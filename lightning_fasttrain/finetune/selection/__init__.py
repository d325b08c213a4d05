"""Selection of parameters and layers: which are frozen, which get an adapter, which belong to the base model.

Only ``swap_head`` adds parameters.

From the bottom up: ``_search``, ``freezing``, ``swap_head``, ``base_fingerprint``, ``_adapter_switches``,
``_float32_adapters``, ``_trained_copies``, ``gradual_unfreezing``, ``uncovered_weights``, ``targets``.
"""
