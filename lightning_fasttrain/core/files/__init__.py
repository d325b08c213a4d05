"""Files: written atomically, read without trust, and the choice of the newest checkpoint.

From the bottom up: ``atomic_write``, ``safe_load``, ``checkpoint_folder``, ``remote_checkpoint``,
``newest_checkpoint``, ``background_save``.
"""
