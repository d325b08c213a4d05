"""The part of a model in which samples do not depend on one another runs in micro-batches; the loss sees them all.

From the bottom up: ``float32_uses``, ``micro_batch_forward``, ``try_trunk``, ``find_trunk``,
``batch_search``.
"""
