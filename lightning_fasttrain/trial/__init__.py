"""Trials: a step is run on a few samples, unsplit and in micro-batches, without side effects, and compared.

What a step changes besides gradients is in ``core.state.step_state``.

From the bottom up: ``read_normalizers``, ``deterministic_step``, ``sample_rows``, ``runs``, ``try_split``.
"""
