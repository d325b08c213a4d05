"""Trains virtual tokens before the input of a Hugging Face model.

They are PEFT's, put into the model itself.

From the bottom up: ``_prompt_checks``, ``add_prompt``, ``prompt_tuning``.
"""
