"""Trains with DeepSpeed's ZeRO, in the Trainer and in Fabric, its stage chosen.

What hosts get wrong there is put right.

From the bottom up: ``_zero_conflicts``, ``_zero_files``, ``_zero_groups``, ``_zero_stage``, ``_zero_engine``,
``zero_checkpoint``, ``zero_fabric``, ``zero_strategy``.
"""
