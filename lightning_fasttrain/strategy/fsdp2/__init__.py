"""FSDP2 strategies for the Trainer and for Fabric.

Checkpoints are written by all ranks and load on any number of ranks.

From the bottom up: ``shard_blocks``, ``sharded_optimizer``, ``sharded_checkpoint``, ``broadcast_weights``,
``sharding``, ``fsdp2_strategy``.
"""
