"""Finds the number of micro-batches that fits during training, repeating a batch that does not fit in more of them.

From the bottom up: ``fallbacks``, ``rank_vote``, ``deferred_gradient_sync``, ``retry_with_smaller_micro_batches``.
"""
