"""Check on the model that the padding of a batch can be cut off, and cut it off, or run blocks without it.

From the bottom up: ``check_documents``, ``document_attention``, ``pack``, ``packed_forward``, ``trim_batch``,
``try_trimming``, ``padding_free``, ``trim_search``.
"""
