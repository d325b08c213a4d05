"""Files: written whole or not at all, read without trust, and which checkpoint is the newest.

From the bottom up: ``atomic_write``, ``safe_load``, ``checkpoint_folder``, ``guarded_loading``, ``run_mark``,
``newest_checkpoint``.
"""
