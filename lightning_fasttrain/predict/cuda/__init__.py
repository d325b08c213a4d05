"""What a step allocates on CUDA and not on the CPU: attention, dispatch of operations, and workspace of kernels.

From the bottom up: ``cuda_attention``, ``cuda_dispatch``, ``cuda_workspace``.
"""
