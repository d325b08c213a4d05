"""Names what a model consists of: what is frozen, what gets an adapter, what base there is.

Nothing here adds a parameter but ``swap_head``.

From the bottom up: ``_float32_adapters``, ``freezing``, ``swap_head``, ``base_fingerprint``, ``_adapter_switches``,
``gradual_unfreezing``, ``uncovered_weights``, ``targets``.
"""
