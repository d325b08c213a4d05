"""Write complete checkpoints or none, and resume a killed run bit for bit.

From the bottom up: ``loaders``, ``gathered_states``, ``run_fingerprint``, ``atomic_checkpoints``, ``resume_state``,
``exact_resume``.
"""
