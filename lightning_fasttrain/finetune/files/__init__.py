"""Save and load adapters in PEFT's format.

Files are written atomically, and their contents are not trusted when loading.

From the bottom up: ``_adapter_config``, ``_adapter_folder``, ``_adapter_layers``, ``_expected_tensors``,
``_prompt_files``, ``adapter_files``, ``export_model``.
"""
