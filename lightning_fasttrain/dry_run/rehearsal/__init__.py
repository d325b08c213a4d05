"""Does what a run will do in its later hours within its first minute, on copies, and leaves no trace.

From the bottom up: ``rehearsal_report``, ``state_record``, ``run_copy``, ``disk_space``, ``isolation``,
``nested_trainer``, ``peek_batches``, ``small_run``, ``context``, ``stages``, ``resume_stage``, ``rehearsal``.
"""
