"""How much a step holds, how that grows, and how much of it there is in a run.

From the bottom up: ``learning_rate_scaling``, ``growth_schedule``, ``batch_size_warmup``, ``sequence_length_warmup``.
"""
