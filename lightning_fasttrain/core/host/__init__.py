"""Lightning's Trainer, DeepSpeed's optimizers and Hugging Face's masks, as far as their privates are needed.

From the bottom up: ``lightning``, ``host_answers``, ``late_parameters``, ``loader_wrapper``, ``deepspeed``,
``optimizer_steps``.
"""
