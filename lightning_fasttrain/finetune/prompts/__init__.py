"""Trains virtual tokens before the input of a Hugging Face model.

They are PEFT's, whose model takes the model's place.

From the bottom up: ``_prompt_hooks``, ``add_prompt``, ``prompt_tuning``.
"""
