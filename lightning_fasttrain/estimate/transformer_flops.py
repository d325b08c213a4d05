"""Parameters and FLOPs of transformers by published formulas."""

from typing import Literal

from lightning_fasttrain.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, check_arguments

Recomputation = Literal["none", "selective", "full"]


@check_arguments
def six_n_flops(parameters: PositiveFloat, tokens: PositiveFloat) -> float:
    """Return the FLOPs of a training, C = 6 N D: for each parameter and token 2 in the forward, 4 in the backward.

    Args:
        parameters: N. Kaplan et al. leave out embeddings, Hoffmann et al. and GPT-3 include them.
        tokens: D.

    Example:
        >>> f"{six_n_flops(174.6e9, 300e9):.3g}"  # GPT-3
        '3.14e+23'

    Source:
        Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361. Checked against table D.1 of GPT-3, Brown et
        al. 2020, https://arxiv.org/abs/2005.14165.
    """
    return 6 * parameters * tokens


@check_arguments
def kaplan_parameters(
    layers: PositiveInt,
    width: PositiveInt,
    attention_width: PositiveInt | None = None,
    mlp_width: PositiveInt | None = None,
) -> int:
    """Return the parameters of a transformer without embeddings, N = 2 d L (2 d_attn + d_ff), and without vectors.

    Args:
        layers: L.
        width: d, of the hidden state.
        attention_width: d_attn, of all heads together; by default d.
        mlp_width: d_ff; by default 4 d, with which N = 12 L d².

    Example:
        >>> kaplan_parameters(layers=96, width=12288)  # GPT-3
        173946175488

    Source:
        Kaplan et al. 2020, equation 2.1, https://arxiv.org/abs/2001.08361.
    """
    return 2 * width * layers * (2 * (attention_width or width) + (mlp_width or 4 * width))


@check_arguments
def kaplan_forward_flops(
    parameters: PositiveFloat, layers: PositiveInt, context: PositiveInt, attention_width: PositiveInt
) -> float:
    """Return the FLOPs of the forward for one token, 2 N + 2 L n_ctx d_attn; a training takes three times as many.

    Its second term, attention, is half of that of :func:`palm_flops_per_token`, as if attention were causal.

    Args:
        parameters: N, without embeddings.
        layers: L.
        context: n_ctx, tokens of a sequence.
        attention_width: d_attn, of all heads together.

    Example:
        >>> kaplan_forward_flops(1.5e9, layers=48, context=1024, attention_width=1600)
        3157286400.0

    Source:
        Kaplan et al. 2020, equation 2.2, https://arxiv.org/abs/2001.08361.
    """
    return 2 * parameters + 2 * layers * context * attention_width


@check_arguments
def palm_flops_per_token(
    parameters: PositiveFloat,
    layers: NonNegativeInt,
    heads: PositiveInt,
    head_width: PositiveInt,
    context: PositiveInt,
) -> float:
    """Return the model FLOPs of a training for one token, 6 N + 12 L H Q T, without recomputation.

    Args:
        parameters: N.
        layers: L; 0 to leave attention out.
        heads: H.
        head_width: Q, elements of a head.
        context: T, tokens of a sequence; attention is counted for all of them, as if it were not causal.

    Example:
        >>> f"{palm_flops_per_token(540.35e9, layers=118, heads=48, head_width=256, context=2048):.5g}"  # PaLM
        '3.2777e+12'

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311.
    """
    return 6 * parameters + 12 * layers * heads * head_width * context


@check_arguments
def megatron_parameters(
    layers: PositiveInt, width: PositiveInt, vocabulary: PositiveInt, context: PositiveInt
) -> float:
    """Return the parameters of a GPT with a tied head, 12 l h² (1 + 13 / 12h + (V + s) / 12lh).

    Args:
        layers: l.
        width: h.
        vocabulary: V.
        context: s, the number of learned positions.

    Example:
        >>> f"{megatron_parameters(layers=96, width=12288, vocabulary=51200, context=2048):.4g}"
        '1.746e+11'

    Source:
        Narayanan et al. 2021, section 5.1, https://arxiv.org/abs/2104.04473.
    """
    return 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocabulary + context) / (12 * layers * width))


@check_arguments
def megatron_flops(
    batch: PositiveInt,
    layers: PositiveInt,
    width: PositiveInt,
    vocabulary: PositiveInt,
    context: PositiveInt,
    recomputation: Recomputation = "none",
) -> float:
    """Return the FLOPs of one training step of a GPT, 72 B L s h² (1 + s / 6h + v / 12hL).

    With recomputation it is the number that the hardware computes: selective recomputation repeats the products of
    attention, which makes the second term s / 3h; full recomputation repeats the forward of all layers.

    Args:
        batch: B, sequences of a step.
        layers: L.
        width: h.
        vocabulary: v.
        context: s, tokens of a sequence.
        recomputation: ``"none"``, ``"selective"`` or ``"full"``.

    Example:
        >>> selective = megatron_flops(64, 96, 12288, 51200, 2048, recomputation="selective")  # GPT-3
        >>> f"{selective / megatron_flops(64, 96, 12288, 51200, 2048) - 1:.1%}"
        '2.7%'

    Source:
        Korthikanti et al. 2022, equations 7 and 8, https://arxiv.org/abs/2205.05198; full recomputation as in
        Narayanan et al. 2021, https://arxiv.org/abs/2104.04473. Checked against their table 5.
    """
    base = 72 * batch * layers * context * width**2
    attention, head = context / (6 * width), vocabulary / (12 * width * layers)
    if recomputation == "selective":
        return base * (1 + 2 * attention + head)
    if recomputation == "full":
        return base * (4 / 3 * (1 + attention) + head)
    return base * (1 + attention + head)
