"""Tensor parallelism inside a data-parallel mesh: each rank of a tensor group computes with its part of the layers.

From the bottom up: ``layouts``, ``styles``, ``vocabulary``, ``divisors``, ``attention_and_mlp``, ``plan``,
``parallelize``, ``tensor_group``.
"""
