"""Reads and writes adapters in PEFT's format.

Files are written whole or not at all, and read without trust.

From the bottom up: ``_adapter_config``, ``_adapter_folder``, ``_adapter_layers``, ``_prompt_files``,
``adapter_files``, ``export_model``.
"""
