"""Measure steps: time by phase, throughput, peak memory, and a timeline of memory by category.

From the bottom up: ``memory_events``, ``memory_record``, ``memory_meter``, ``peak_flops``, ``slow_ranks``,
``step_timer``, ``memory_page``, ``step_meter``, ``memory_files``, ``memory_recording``, ``memory_timeline``.
"""
