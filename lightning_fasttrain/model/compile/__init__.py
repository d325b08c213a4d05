"""Compile the blocks of a model, check the compiled code, and cache it for later runs.

From the bottom up: ``compile_report``, ``known_compiler_faults``, ``compiled_check``, ``compile_blocks``.
"""
