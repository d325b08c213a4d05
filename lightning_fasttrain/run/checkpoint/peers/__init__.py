"""Snapshots of a training state in the memory of the host and of a peer.

From the bottom up: ``local_state``, ``peer_memory``, ``peer_snapshots``.
"""
