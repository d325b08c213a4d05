"""How much a step holds, how that grows, and how much of it there is in a run.

From the bottom up: ``run_length``, ``counters``, ``duration``, ``growth_schedule``, ``sequence_length_warmup``,
``learning_rate_scaling``, ``batch_size_warmup``.
"""
