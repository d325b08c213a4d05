"""Try the later stages of a run within its first minute, on copies, without side effects.

From the bottom up: ``rehearsal_report``, ``state_record``, ``run_copy``, ``disk_space``, ``nested_trainer``,
``peek_batches``, ``small_run``, ``context``, ``stages``, ``rehearsal``.
"""
