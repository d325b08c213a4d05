"""FSDP2 strategies for the Trainer and for Fabric.

Checkpoints are written by all ranks and load on any number of ranks.

From the bottom up: ``_shard_index``, ``_sharded_optimizer``, ``_packed_weights``, ``replicated_scalars``,
``separate_groups``, ``shard_blocks``, ``sharded_checkpoint``, ``broadcast_weights``, ``sharding``, ``fsdp2_fabric``,
``fsdp2_strategy``.
"""
