"""``fasttrain rehearse``: rehearse a script as it is, and kill it on purpose.

From the bottom up: ``run_script``, ``rehearsed_script``, ``rehearse``, ``killed_script``.
"""
