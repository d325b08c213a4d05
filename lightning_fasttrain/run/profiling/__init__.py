"""Measure steps: time by phase, throughput, peak memory, a timeline of memory by category, and gradient noise.

From the bottom up: ``memory_record``, ``memory_meter``, ``step_timer``, ``memory_files``, ``step_meter``,
``memory_recording``, ``memory_timeline``, ``noise_scale``, ``gradient_noise_scale``.
"""
