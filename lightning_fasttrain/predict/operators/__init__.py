"""Results of operators on fake tensors: values that are assumed, and a cache of shapes.

From the bottom up: ``data_dependent_values``.
"""
