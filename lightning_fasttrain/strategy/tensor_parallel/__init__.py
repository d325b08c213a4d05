"""Tensor and context parallelism inside a data-parallel mesh: the ranks of a group compute one batch together.

Each rank has its part of the layers in a tensor group, and its share of the tokens of sequences in a context group.

From the bottom up: ``layouts``, ``styles``, ``plan``, ``sequence_parallel``, ``parallelize``,
``context_parallel``.
"""
