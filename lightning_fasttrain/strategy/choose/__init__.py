"""Choose a strategy by what parameters, gradients, optimizer state and traffic take on a rank.

Nothing is allocated for it.

From the bottom up: ``_optimizer_state``, ``_model_sizes``, ``model_states``, ``_limits``, ``choose_stage``.
"""
