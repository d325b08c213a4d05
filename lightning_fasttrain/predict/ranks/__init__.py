"""Prediction for one rank of many: sharded models on fake tensors, and collectives that move nothing.

From the bottom up: ``fake_ranks``, ``sharded_model``, ``rank_states``, ``one_rank``.
"""
