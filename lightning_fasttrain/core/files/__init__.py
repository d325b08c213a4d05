"""Files: written atomically, and read without trust.

From the bottom up: ``atomic_write``, ``safe_load``.
"""
