"""``fasttrain tune``: measure a user's script, choose techniques for it, and show what to change.

From the bottom up: ``apply_advice``, ``advice``, ``tune_page``, ``tune``, ``make_advice``, ``tuned_loop``,
``tuned_script``.
"""
