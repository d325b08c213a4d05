"""Write complete checkpoints or none, and resume a killed run bit for bit.

From the bottom up: ``_gathered_states``, ``_loop_progress``, ``checkpoint_disk_space``, ``loader_rng``,
``run_fingerprint``, ``seeded_samples``, ``dataset_state``, ``unsaved_state``, ``atomic_checkpoints``,
``resumable_loader``, ``resume_state``, ``exact_resume``.
"""
