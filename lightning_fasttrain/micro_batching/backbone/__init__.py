"""Run the submodules in which samples do not depend on one another in micro-batches, and the loss on the whole batch.

From the bottom up: ``micro_batch_forward``, ``find_backbone``.
"""
