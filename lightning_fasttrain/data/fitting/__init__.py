"""Finds the number of parts that fits, while training: a batch that does not is repeated in more of them.

From the bottom up: ``_agreement``, ``split_until_it_fits``, ``further_savings``, ``_alone_then_together``.
"""
