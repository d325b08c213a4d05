"""From what was watched to findings, one family a file.

From the bottom up: ``operators``, ``training_faults``, ``run_costs``.
"""
