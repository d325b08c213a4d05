"""DeepSpeed ZeRO strategies for the Trainer and for Fabric, with automatic choice of the stage.

They also fix errors of Lightning's and DeepSpeed's own integration.

From the bottom up: ``zero_states``, ``zero_engine``, ``zero_host``, ``zero_checkpoint``, ``zero_strategy``.
"""
