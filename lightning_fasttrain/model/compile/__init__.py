"""Compile the blocks of a model, check the compiled code, and cache it for later runs.

From the bottom up: ``compiled_check``, ``compile_report``, ``compile_cache``, ``known_compiler_faults``,
``compile_blocks``.
"""
