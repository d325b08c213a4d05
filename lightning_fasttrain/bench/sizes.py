"""The sizes of the ladder's model, and how many tokens a step of each takes."""

from dataclasses import dataclass

from lightning_fasttrain.bench.gpt import GPTConfig
from lightning_fasttrain.core.checks import one_of

# GPT-2's 50,257 tokens, rounded up to a multiple of 64 so that the head's matrix product fits the hardware.
GPT2_VOCABULARY = 50_304


@dataclass(frozen=True)
class Size:
    """A model and the batch it is trained with.

    Args:
        model: the shape of the GPT.
        batch: sequences per optimizer step, each as long as the model's context.
        tokens: ``"bytes"`` or ``"bpe"``, how text becomes token ids.
        steps: timed steps per rung.
        micro_batches: parts that its batch is split into.
        minutes: that a ladder may take before it stops to run rungs again for the sake of their times.
    """

    model: GPTConfig
    batch: int
    tokens: str = "bytes"
    steps: int = 8
    micro_batches: int = 4
    minutes: float = 5.0


def _gpt2(layers: int, width: int, heads: int) -> Size:
    model = GPTConfig(vocabulary=GPT2_VOCABULARY, context=1024, layers=layers, heads=heads, width=width)
    return Size(model, batch=32, tokens="bpe", steps=10, minutes=15.0)


SIZES = {
    # For a CPU: few parameters and many tokens, so that memory is activations, as it is in a real run on a GPU.
    "nano": Size(GPTConfig(context=256, layers=6, heads=4, width=128), batch=32, steps=6, micro_batches=16),
    "tiny": Size(GPTConfig(context=512, layers=4, heads=4, width=256), batch=32, steps=3, micro_batches=16),
    # The default: products wide enough that they take most of the time, and a run within five minutes on two cores.
    "mini": Size(GPTConfig(context=256, layers=3, heads=4, width=256), batch=64, steps=2, micro_batches=16),
    "gpt2-small": _gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-xl": _gpt2(layers=48, width=1600, heads=25),
}


def size_named(name: str) -> Size:
    """The size called ``name``.

    Raises:
        ValueError: there is none; the message lists the sizes.

    Example:
        >>> size_named("tiny").model.width
        256
    """
    return SIZES[one_of("size", name, tuple(SIZES))]
