"""Growth of the batch size and the sequence length over a run.

From the bottom up: ``growth_schedule``, ``batch_size_warmup``, ``sequence_length_warmup``.
"""
