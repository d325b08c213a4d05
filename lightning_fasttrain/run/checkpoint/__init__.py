"""Write complete checkpoints or none, and resume a killed run bit for bit.

From the bottom up: ``checkpoint_disk_space``, ``loaders``, ``gathered_states``, ``other_ranks``, ``run_fingerprint``,
``loop_progress``, ``unsaved_state``, ``atomic_checkpoints``, ``resume_state``, ``exact_resume``.
"""
