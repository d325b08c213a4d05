"""Runs a step on tensors that have shapes but no memory, and adds up what they would take.

What kernels take beside them is added where it is known.

From the bottom up: ``cuda_dispatch``, ``data_dependent_values``, ``allocation_trace``, ``memory_report``,
``cuda_workspace``, ``fake_model``, ``kernel_workspace``, ``predict_memory``, ``count_flops``.
"""
