"""DeepSpeed ZeRO strategies for the Trainer and for Fabric, with automatic choice of the stage.

They also fix errors of Lightning's and DeepSpeed's own integration.

From the bottom up: ``_zero_conflicts``, ``_zero_files``, ``optimizer_fixes``, ``_zero_engine``, ``zero_checkpoint``,
``stage_agreement``, ``zero_fabric``, ``zero_strategy``.
"""
