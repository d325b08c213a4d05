"""Write complete checkpoints or none, and resume a killed run bit for bit.

From the bottom up: ``_gathered_states``, ``_loop_progress``, ``checkpoint_disk_space``, ``loaders``, ``other_ranks``,
``run_fingerprint``, ``unsaved_state``, ``atomic_checkpoints``, ``resume_state``, ``exact_resume``.
"""
