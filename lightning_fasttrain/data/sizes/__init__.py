"""How much a step holds, how that grows, and how much of it there is in a run.

From the bottom up: ``lengths``, ``run_length``, ``seen``, ``growth``, ``scale_rates``, ``batch_size_warmup``,
``sequence_length_warmup``.
"""
