"""From what was watched to findings, one family a file.

From the bottom up: ``data_waits``, ``training_faults``, ``schedulers``, ``growing_memory``, ``operators``,
``optimizer_step``, ``run_costs``, ``ranks``.
"""
