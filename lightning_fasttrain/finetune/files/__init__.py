"""Save and load adapters in PEFT's format.

Files are written atomically, and their contents are not trusted when loading.

From the bottom up: ``adapter_config``, ``expected_tensors``, ``adapter_files``, ``export_model``.
"""
