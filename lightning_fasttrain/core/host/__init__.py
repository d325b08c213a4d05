"""Lightning's Trainer, as far as its privates are needed.

From the bottom up: ``checkpoint_content``, ``lightning``, ``same_gradients``, ``strategy_names``, ``late_parameters``,
``loader_wrapper``.
"""
