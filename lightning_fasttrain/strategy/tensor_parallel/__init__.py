"""Tensor parallelism inside a data-parallel mesh: each rank of a tensor group computes with its part of the layers.

From the bottom up: ``layouts``, ``styles``, ``vocabulary``, ``split_dropout``, ``divisors``,
``attention_and_mlp``, ``sequence``, ``plan``, ``parallelize``, ``tensor_group``.
"""
