"""Shards a model with FSDP2, in the Trainer and in Fabric.

Checkpoints are written by all ranks and load on any number.

From the bottom up: ``_dcp_reading``, ``_sharded_optimizer``, ``_packed_weights``, ``shard_blocks``,
``sharded_checkpoint``, ``shared_buffers``, ``broadcast_weights``, ``sharding``, ``fsdp2_fabric``, ``oom_safe_gathers``,
``fsdp2_strategy``.
"""
