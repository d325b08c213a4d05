"""How micro-batches and windows take part in Lightning's automatic optimisation.

From the bottom up: ``roles``, ``scale_gradients``, ``split_search``, ``micro_batch_closure``.
"""
