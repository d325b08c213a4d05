"""Estimate the memory of a step: predicted, by published formulas, and measured."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.estimate.activation_memory import activation_bytes_per_layer, input_and_output_bytes
from lightning_fasttrain.estimate.counted_flops import StepFlops
from lightning_fasttrain.estimate.measured_step import MeasuredStep
from lightning_fasttrain.estimate.transformer_flops import Recomputation
from lightning_fasttrain.memory import predict_memory
from lightning_fasttrain.memory.fake_step import Factory
from lightning_fasttrain.memory.predict_memory import Loss
from lightning_fasttrain.technique import Technique

_FACTORS: dict[Recomputation, str] = {
    "none": "34 + 5as/h",
    "selective": "34, as with flash attention",
    "full": "2",
}
Memory = dict[str, tuple[float, str]]  # what → (bytes, how they are known)


def predicted_bytes(
    module: nn.Module | Factory,
    batch: object,
    precision: str,
    techniques: Sequence[Technique],
    loss: Loss | None,
    optimizer: Callable[[Any], Optimizer] | None,
    device: str,
) -> Memory:
    """Predict the peak of a step, and its activations.

    Raises:
        TypeError, ValueError: as :func:`~lightning_fasttrain.memory.predict_memory`.
    """
    predicted = predict_memory(
        module, batch, loss=loss, optimizer=optimizer, techniques=techniques, precision=precision, device=device
    )
    how = f"predict_memory, {precision}, on {device}, without sharding"
    activations = predicted.peaks["activations"]
    return {
        "peak, predicted": (predicted.peak_bytes, how),
        "activations, predicted": (activations, "the most in a step"),
    }


def formula_bytes(flops: StepFlops, batch: object) -> Memory:
    """Return the activations of a transformer by the formulas of Korthikanti et al.; nothing for other models."""
    shape, width, samples = flops.shape, flops.hidden_width, count_batch(batch)[0]
    if shape is None or not shape.heads or not width or flops.tokens != samples * shape.context:
        return {}
    outside = input_and_output_bytes(shape.context, samples, width, flops.vocabulary)
    found: Memory = {}
    how = "Korthikanti et al. 2022: 16 bits, GELU, dropout"
    for recomputation, words in _FACTORS.items():
        layer = activation_bytes_per_layer(shape.context, samples, width, shape.heads, recomputation)
        label = f"activations, formula, recomputation {recomputation}"
        found[label] = layer * shape.layers + outside, f"{shape.layers} × sbh({words}) + sb(5h + 4v); {how}"
    return found


def measured_bytes(measured: MeasuredStep) -> Memory:
    """Return the memory of the measured step."""
    return {
        "peak, measured": (measured.peak_bytes, f"a step on this machine's {measured.device}"),
        "activations, measured": (measured.activation_bytes, "the most during that step"),
    }
