"""From what was watched to findings, one family a file.

From the bottom up: ``host_syncs``, ``data_waits``, ``training_faults``, ``module_modes``, ``schedulers``,
``growing_memory``, ``operators``, ``optimizer_step``, ``run_costs``, ``compiler``, ``ranks``.
"""
