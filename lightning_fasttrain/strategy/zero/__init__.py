"""DeepSpeed ZeRO strategies for the Trainer and for Fabric, with automatic choice of the stage.

They also fix errors of Lightning's and DeepSpeed's own integration.

From the bottom up: ``optimizer_fixes``, ``_zero_files``, ``stage_question``, ``_zero_engine``, ``zero_host``,
``zero_checkpoint``, ``zero_fabric``, ``zero_strategy``.
"""
