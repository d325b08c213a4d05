"""Shards a model with FSDP2, in the Trainer and in Fabric.

Checkpoints are written by all ranks and load on any number.

From the bottom up: ``_dcp_reading``, ``_sharded_optimizer``, ``_packed_weights``, ``shard_blocks``, ``materialize``,
``gathers_in_step``, ``sharded_checkpoint``, ``sharding``, ``shared_buffers``, ``fsdp2_fabric``, ``fsdp2_strategy``.
"""
