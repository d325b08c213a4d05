"""Results of operators on fake tensors: values that are assumed, and lists of sharded tensors.

From the bottom up: ``data_dependent_values``, ``sharded_lists``.
"""
