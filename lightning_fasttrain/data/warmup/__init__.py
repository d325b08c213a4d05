"""Growth of the batch size, of sequence lengths and of image sizes over a run.

From the bottom up: ``growth_schedule``, ``batch_size_warmup``, ``sequence_length_warmup``, ``progressive_resizing``.
"""
