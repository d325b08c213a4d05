"""Compile the blocks of a model, and check the compiled code.

From the bottom up: ``compiled_check``, ``compiled_forward``, ``partitioned_forward``, ``compile_blocks``.
"""
