"""Predict what only CUDA allocates in a step: in attention, in the dispatch of operations, as workspace of kernels.

From the bottom up: ``cuda_dispatch``, ``cuda_workspace``.
"""
