"""Files: written atomically, read without trust, and the choice of the newest checkpoint.

From the bottom up: ``atomic_write``, ``background_save``, ``safe_load``, ``checkpoint_folder``,
``remote_checkpoint``, ``guarded_loading``, ``run_mark``, ``newest_checkpoint``.
"""
