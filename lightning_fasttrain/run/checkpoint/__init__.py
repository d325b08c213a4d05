"""Write complete checkpoints or none, and resume a killed run bit for bit.

From the bottom up: ``_gathered_states``, ``_loop_progress``, ``checkpoint_disk_space``, ``extra_state``,
``loader_rng``, ``run_fingerprint``, ``_running_metrics``, ``atomic_checkpoints``, ``resumable_loader``,
``exact_resume``.
"""
