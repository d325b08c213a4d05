"""Train virtual tokens that are prepended to the input of a Hugging Face model.

PEFT implements the virtual tokens; a ``PeftModel`` replaces the model.

From the bottom up: ``add_prompt``, ``prompt_tuning``.
"""
