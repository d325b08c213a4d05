"""Finds the number of parts that fits, while training: a batch that does not is repeated in more of them.

From the bottom up: ``fallbacks``, ``rank_vote``, ``deferred_gradient_sync``, ``retry_with_smaller_micro_batches``.
"""
