"""Compile the blocks of a model, check the compiled code, and cache it for later runs.

From the bottom up: ``compile_report``, ``compiled_check``, ``recomputed_attention``, ``compiled_code``,
``compiled_forward``, ``compile_blocks``.
"""
