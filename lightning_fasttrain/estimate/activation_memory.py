"""Activation memory of a transformer layer by published formulas."""

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.estimate.transformer_flops import Recomputation


@check_arguments
def activation_bytes_per_layer(
    context: PositiveInt,
    batch: PositiveInt,
    width: PositiveInt,
    heads: PositiveInt,
    recomputation: Recomputation = "none",
    tensor_parallel: PositiveInt = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes of activations that a transformer layer keeps for its backward, in 16 bits, on each device.

    Without recomputation s b h (34 + 5 a s / h): attention 11 s b h + 5 a s² b, MLP 19 s b h, norms 4 s b h. Of these,
    5 a s² b are the softmax and its dropout, which selective recomputation, and kernels such as flash attention, do not
    keep. Full recomputation keeps the input of the layer, 2 s b h. The layer has dropout and a GELU of width 4 h.

    Args:
        context: s, tokens of a sequence.
        batch: b, sequences of a micro-batch.
        width: h.
        heads: a.
        recomputation: ``"none"``, ``"selective"`` or ``"full"``.
        tensor_parallel: t, devices that share a layer, of which each keeps 10 of the 34 in full.
        sequence_parallel: whether they share these too.

    Raises:
        ValueError: ``sequence_parallel`` on a single device.

    Example:
        >>> f"{activation_bytes_per_layer(2048, 1, 12288, 96) / 2**30:.2f} GiB"  # GPT-3
        '2.67 GiB'

    Source:
        Korthikanti et al. 2022, equations 1 to 6 and table 2, https://arxiv.org/abs/2205.05198.
    """
    if sequence_parallel and tensor_parallel == 1:
        why = "the devices that share sequences are those that share layers"
        raise ValueError(explain("sequence_parallel with tensor_parallel=1", why, "Set tensor_parallel=8"))
    unit = context * batch * width
    if recomputation == "full":
        return 2.0 * unit
    attention = 5 * heads * context / width if recomputation == "none" else 0.0
    shared = tensor_parallel if sequence_parallel else 1
    return unit * (10 / shared + (24 + attention) / tensor_parallel)


@check_arguments
def input_and_output_bytes(
    context: PositiveInt, batch: PositiveInt, width: PositiveInt, vocabulary: PositiveInt
) -> float:
    """Return the bytes of activations outside of the layers, on one device and without pipelining.

    The dropout of the embeddings keeps s b h, the last norm and the output layer 2 s b h each, and the loss 4 s b v,
    as its logits are in float32.

    Args:
        context: s.
        batch: b.
        width: h.
        vocabulary: v.

    Example:
        >>> f"{input_and_output_bytes(2048, 1, 12288, 51200) / 2**30:.2f} GiB"
        '0.51 GiB'

    Source:
        Korthikanti et al. 2022, section 4.3, https://arxiv.org/abs/2205.05198, without tensor parallelism.
    """
    return context * batch * (5.0 * width + 4.0 * vocabulary)
