"""Runs a step on tensors that have shapes but no memory, and adds up what they would take.

What kernels take beside them is added where it is known.

From the bottom up: ``as_on_cuda``, ``assumed_numbers``, ``allocation_trace``, ``fake_copy``, ``memory_report``,
``unseen_memory``, ``unseen_on_cuda``, ``predict_memory``, ``count_flops``.
"""
