"""Choice of the kernels that compute a step: precision of products, layout of convolutions, back ends.

From the bottom up: ``matmul_precision``, ``cudnn_benchmark``, ``channels_last``, ``low_precision_products``,
``attention_backend``.
"""
