"""Run the submodules in which samples do not depend on one another in micro-batches, and the loss on the whole batch.

From the bottom up: ``float32_uses``, ``micro_batch_forward``, ``try_trunk``, ``find_trunk``,
``batch_search``.
"""
