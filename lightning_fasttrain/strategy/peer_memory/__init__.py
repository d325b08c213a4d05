"""Snapshots in host memory, on two hosts each, from which a run with a lost rank continues without checkpoint files.

From the bottom up: ``local_state``, ``peer_memory``.
"""
