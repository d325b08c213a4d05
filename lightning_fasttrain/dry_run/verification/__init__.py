"""Runs a step of a user's model plainly and with techniques, and says whether it is the same training.

The yardstick is the rounding of the plain step itself, measured on that model.

From the bottom up: ``digest``, ``short_run``, ``batches``, ``step_record``, ``record_steps``, ``first_difference``,
``rounding_noise``, ``compare_records``, ``report``, ``vacuous_checks``, ``proof``, ``verify``.
"""
