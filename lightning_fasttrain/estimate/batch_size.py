"""The critical batch size: what it costs to train with a smaller or a larger one."""

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments


@check_arguments
def critical_batch_tokens(loss: PositiveFloat) -> float:
    """Return the critical batch size in tokens that Kaplan et al. found at a loss, 2e8 / L^(1 / 0.21).

    It is that of one kind of model on one text. :class:`~lightning_fasttrain.profiling.GradientNoiseScale` measures
    yours.

    Args:
        loss: in nats per token of WebText2.

    Example:
        >>> f"{critical_batch_tokens(3.0):.3g}, {critical_batch_tokens(2.0):.3g}"
        '1.07e+06, 7.37e+06'

    Source:
        Kaplan et al. 2020, equation 1.4, https://arxiv.org/abs/2001.08361.
    """
    return 2e8 / loss ** (1 / 0.21)


@check_arguments
def cost_of_batch_size(batch: PositiveFloat, critical: PositiveFloat) -> tuple[float, float]:
    """Return how many times the fewest possible steps, and the least possible data, a training takes.

    With B_crit, S / S_min = 1 + B_crit / B and E / E_min = 1 + B / B_crit. At the critical batch size both are 2.

    Args:
        batch: B, in samples or tokens.
        critical: B_crit, in the same unit; measured by :class:`~lightning_fasttrain.profiling.GradientNoiseScale`.

    Returns:
        Steps, relative to those with an infinite batch; and data, and so FLOPs, relative to those with a tiny batch.

    Example:
        >>> steps, data = cost_of_batch_size(batch=256, critical=1024)
        >>> steps, data
        (5.0, 1.25)

    Source:
        McCandlish et al. 2018, equation 2.11, https://arxiv.org/abs/1812.06162.
    """
    return 1 + critical / batch, 1 + batch / critical
