"""Try the later stages of a run within its first minute, on copies, without side effects.

From the bottom up: ``disk_space``, ``run_copy``, ``small_run``, ``context``, ``stages``, ``rehearsal``.
"""
