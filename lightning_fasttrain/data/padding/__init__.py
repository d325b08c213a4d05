"""Check on the model that the padding of a batch can be cut off, and cut it off in micro-batches.

From the bottom up: ``check_documents``, ``pack``, ``trim_batch``, ``try_trimming``, ``trim_search``.
"""
