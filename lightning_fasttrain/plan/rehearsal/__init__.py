"""Does what a run will do in its later hours within its first minute, on copies, and leaves no trace.

From the bottom up: ``rehearsal_report``, ``reading_ahead``, ``no_trace``, ``checkpoint_places``, ``state_record``,
``same_processes``, ``run_copy``, ``miniature``, ``rehearsed``, ``going_on``, ``stages``, ``rehearsal``.
"""
