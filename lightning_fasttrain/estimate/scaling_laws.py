"""Published scaling laws of language models: loss, compute-optimal sizes, and the range in which they were fitted."""

from dataclasses import dataclass

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain


@check_arguments
@dataclass(frozen=True)
class ScalingLaw:
    """A law L(N, D) = E + A / N^α + B / D^β of the loss in nats per token, and the range in which it was fitted.

    Args:
        name: for messages.
        e: E, the loss of text itself.
        a: A.
        b: B.
        alpha: α.
        beta: β.
        parameters: the smallest and the largest N of the fit, embeddings included.
        tokens: the fewest and the most D.
        source: the paper.

    Example:
        >>> law = ScalingLaw("mine", 1.7, 400, 410, 0.34, 0.28, (1e7, 1e9), (1e8, 1e10), "our runs")
        >>> law.name
        'mine'
    """

    name: str
    e: PositiveFloat
    a: PositiveFloat
    b: PositiveFloat
    alpha: PositiveFloat
    beta: PositiveFloat
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    source: str


_RUNS = (44e6, 16.2e9), (5e9, 500e9)

CHINCHILLA = ScalingLaw(
    "Chinchilla",
    *(1.6934, 406.4, 410.7, 0.3392, 0.2849),
    *_RUNS,
    "Hoffmann et al. 2022, approach 3, https://arxiv.org/abs/2203.15556. The digits are those of the TeX source; the "
    "text rounds α and β to 0.34 and 0.28, which gives other optima than its table A3.",
)
"""The law of Hoffmann et al. 2022, approach 3."""

REPLICATION = ScalingLaw(
    "Chinchilla, replicated",
    *(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    *_RUNS,
    "Besiroglu et al. 2024, https://arxiv.org/abs/2404.10102: the same runs, fitted again. It agrees with approaches 1 "
    "and 2 of Hoffmann et al., with about 20 tokens for each parameter; their approach 3 does not.",
)
"""The law of Besiroglu et al. 2024, a replication of :data:`CHINCHILLA`, which is the default here."""


@check_arguments
def expected_loss(parameters: PositiveFloat, tokens: PositiveFloat, law: ScalingLaw = REPLICATION) -> float:
    """Return the loss that a law expects, in nats per token of the text and tokenizer it was fitted on.

    Args:
        parameters: N, embeddings included.
        tokens: D, each seen once.
        law: :data:`REPLICATION` or :data:`CHINCHILLA`.

    Example:
        >>> round(expected_loss(70e9, 1.4e12), 3)  # Chinchilla itself
        1.974

    Source:
        Hoffmann et al. 2022, equation 2, https://arxiv.org/abs/2203.15556. By default the constants
        are those of Besiroglu et al. 2024.
    """
    return law.e + law.a / parameters**law.alpha + law.b / tokens**law.beta


@check_arguments
def optimal_allocation(flops: PositiveFloat, law: ScalingLaw = REPLICATION) -> tuple[float, float]:
    """Return the parameters N and tokens D that give the lowest loss for a budget, with C = 6 N D.

    N = G (C / 6)^(β / (α + β)) and D = C / 6N, with G = (α A / β B)^(1 / (α + β)).

    Args:
        flops: C.
        law: as for :func:`expected_loss`.

    Example:
        >>> parameters, tokens = optimal_allocation(5.76e23)  # the budget of Gopher and Chinchilla
        >>> f"{parameters:.3g}, {tokens:.3g}"
        '7.22e+10, 1.33e+12'

    Source:
        Hoffmann et al. 2022, equation 4, https://arxiv.org/abs/2203.15556.
    """
    g = (law.alpha * law.a / (law.beta * law.b)) ** (1 / (law.alpha + law.beta))
    parameters = g * (flops / 6) ** (law.beta / (law.alpha + law.beta))
    return parameters, flops / 6 / parameters


@check_arguments
def optimal_tokens(parameters: PositiveFloat, law: ScalingLaw = REPLICATION) -> float:
    """Return the tokens D with which N parameters are the best use of the budget 6 N D.

    A model that will be used much is better trained on more tokens than that.

    Args:
        parameters: N, embeddings included.
        law: as for :func:`expected_loss`.

    Example:
        >>> f"{optimal_tokens(70e9):.3g}"
        '1.29e+12'

    Source:
        Hoffmann et al. 2022, equation 4, https://arxiv.org/abs/2203.15556. Checked against their table A3.
    """
    # α A / N^α = β B / D^β, where neither more parameters nor more tokens would gain more.
    return (law.beta * law.b * parameters**law.alpha / (law.alpha * law.a)) ** (1 / law.beta)


@check_arguments
def kaplan_loss(parameters: PositiveFloat, tokens: PositiveFloat) -> float:
    """Return the loss L(N, D) = ((N_c / N)^(α_N / α_D) + D_c / D)^α_D, in nats per token of WebText2.

    Args:
        parameters: N, without embeddings.
        tokens: D.

    Example:
        >>> round(kaplan_loss(1.5e9, 23e9), 2)
        2.31

    Source:
        Kaplan et al. 2020, equation 1.5 and table 2, https://arxiv.org/abs/2001.08361: α_N = 0.076, α_D = 0.103,
        N_c = 6.4e13, D_c = 1.8e13. Fitted for 768 to 1.5e9 parameters and 22e6 to 23e9 tokens.
    """
    return ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


@check_arguments
def kaplan_loss_of_compute(pf_days: PositiveFloat) -> float:
    """Return the lowest loss that a budget reaches, L = (C_c / C)^0.050 with C_c = 3.1e8 PF-days.

    Args:
        pf_days: C, at batches far below the critical batch size.

    Example:
        >>> round(kaplan_loss_of_compute(1.0), 2)
        2.66

    Source:
        Kaplan et al. 2020, equation 1.3, https://arxiv.org/abs/2001.08361.
    """
    return (3.1e8 / pf_days) ** 0.050


@check_arguments
def kaplan_allocation(pf_days: PositiveFloat) -> tuple[float, float]:
    """Return the parameters, without embeddings, and the tokens of a budget: 1.3e9 C^0.73 and 2e10 C^0.27.

    Its models were trained with a schedule of one length for all; Hoffmann et al. found that tokens should grow as
    parameters do, so :func:`optimal_allocation` is the better guide.

    Args:
        pf_days: C, at batches far below the critical batch size. At that size a training takes twice as much.

    Example:
        >>> parameters, tokens = kaplan_allocation(1.0)
        >>> parameters, tokens
        (1300000000.0, 20000000000.0)

    Source:
        Kaplan et al. 2020, table 6, https://arxiv.org/abs/2001.08361.
    """
    return 1.3e9 * pf_days**0.73, 2e10 * pf_days**0.27


@check_arguments
def outside_of_range(parameters: PositiveFloat, tokens: PositiveFloat, law: ScalingLaw = REPLICATION) -> str:
    """Return in words how far N and D are outside of the range in which a law was fitted; "" if they are inside.

    Args:
        parameters: N.
        tokens: D.
        law: as for :func:`expected_loss`.

    Example:
        >>> outside_of_range(1e9, 20e9)
        ''
        >>> outside_of_range(70e9, 20e9)
        'extrapolated: 70e9 parameters, where the law was fitted for 44e6 to 16.2e9'

    Source:
        Hoffmann et al. 2022, table A9, https://arxiv.org/abs/2203.15556, and its abstract.
    """
    beyond: list[str] = []
    for value, (low, high), what in ((parameters, law.parameters, "parameters"), (tokens, law.tokens, "tokens")):
        if not low <= value <= high:
            beyond.append(f"{_in_e(value)} {what}, where the law was fitted for {_in_e(low)} to {_in_e(high)}")
    return f"extrapolated: {'; '.join(beyond)}" if beyond else ""


def _in_e(value: float) -> str:
    for power in (12, 9, 6, 3):
        if value >= 10**power:
            return f"{value / 10**power:.3g}e{power}"
    return f"{value:.3g}"


@check_arguments
def parameters_for_loss(loss: PositiveFloat, law: ScalingLaw = REPLICATION) -> tuple[float, float]:
    """Return the parameters N and tokens D of the smallest budget with which a law expects a loss.

    Args:
        loss: in nats per token.
        law: as for :func:`expected_loss`.

    Raises:
        ValueError: the loss is not above that of text itself, which no budget reaches.

    Example:
        >>> parameters, tokens = parameters_for_loss(2.2)
        >>> round(expected_loss(parameters, tokens), 6)
        2.2

    Source:
        Hoffmann et al. 2022, equations 2 and 4, https://arxiv.org/abs/2203.15556, solved for the budget.
    """
    if loss <= law.e:
        what = f"loss={loss} with the law of {law.name}"
        raise ValueError(
            explain(what, f"it expects {law.e} with any number of parameters and tokens", "Use a higher loss")
        )
    # At the optimum the second term is α / β of the first.
    parameters = (law.a * (1 + law.alpha / law.beta) / (loss - law.e)) ** (1 / law.alpha)
    return parameters, optimal_tokens(parameters, law)


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
