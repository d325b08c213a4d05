"""Lightning's Trainer and DeepSpeed's optimizers, as far as their privates are needed.

From the bottom up: ``lightning``, ``late_parameters``, ``loader_wrapper``, ``optimizer_steps``.
"""
