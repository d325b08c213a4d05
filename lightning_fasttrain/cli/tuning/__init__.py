"""``fasttrain tune``: measure a user's script, choose techniques for it, and show what to change.

From the bottom up: ``apply_advice``, ``tune_page``, ``tune``, ``tuned_script``.
"""
