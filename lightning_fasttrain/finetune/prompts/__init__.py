"""Trains virtual tokens before the input of a Hugging Face model.

They are PEFT's, whose model is put in the place of the model.

From the bottom up: ``_prompt_hooks``, ``add_prompt``, ``prompt_tuning``.
"""
