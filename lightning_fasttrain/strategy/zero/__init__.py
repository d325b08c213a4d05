"""Trains with DeepSpeed's ZeRO, in the Trainer and in Fabric, its stage chosen.

What hosts get wrong there is put right.

From the bottom up: ``_zero_conflicts``, ``_zero_files``, ``optimizer_fixes``, ``_zero_engine``, ``zero_checkpoint``,
``stage_agreement``, ``zero_fabric``, ``zero_strategy``.
"""
