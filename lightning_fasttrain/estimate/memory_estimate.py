"""The memory and the time of a step: by published formulas, predicted, and measured on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.device import dtype_of, peak_flops
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.estimate.flops import Recomputation, StepFlops
from lightning_fasttrain.memory import predict_memory
from lightning_fasttrain.memory.fake_step import Factory
from lightning_fasttrain.memory.predict_memory import Loss
from lightning_fasttrain.profiling import MemoryRecording
from lightning_fasttrain.proof.verification.short_run import MOST_TIMED, StepClock, Steps, run_steps
from lightning_fasttrain.technique import Technique


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


_WARMUP = 4  # steps: techniques such as a memory budget measure and plan in the first three


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of a step on this machine.

    Attributes:
        device: type of the device.
        ms: time of a step, the fastest, since other work of the machine only adds time.
        steps: how many were timed.
        peak_flops: FLOP/s of a large matrix product on that device.
        peak_bytes: peak memory of a step.
        activation_bytes: the most memory of activations.
    """

    device: str
    ms: float
    steps: int
    peak_flops: float
    peak_bytes: int
    activation_bytes: int


def measure_step(
    module: L.LightningModule, batch: object, precision: str, techniques: Sequence[Technique] = ()
) -> MeasuredStep:
    """Run a few steps on a copy of a module on this machine's device.

    Args:
        module: the model, which is not changed.
        batch: the batch of each step.
        precision: of the Trainer.
        techniques: those of the run.

    Raises:
        Exception: any error of the steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"accelerator": device, "precision": precision}
    watch = _Watch(_WARMUP)
    # The same batch each time, so that the list takes no memory.
    run_steps(Steps(module, [batch] * (_WARMUP + MOST_TIMED + 1), settings), techniques, watch)
    peak = peak_flops(torch.device(device), dtype_of(precision))
    return MeasuredStep(device, min(watch.timed), len(watch.timed), peak, watch.peak_bytes, watch.activation_bytes)


class _Watch(StepClock):
    """Times steps, and records the memory of one more by category."""

    activation_bytes = 0
    _recording: MemoryRecording | None = None

    def begin_measuring(self, device: torch.device, *held: Any) -> None:
        self._recording = MemoryRecording(*held).__enter__()

    def end_measuring(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)
            assert recording.record is not None
            self.peak_bytes = recording.record.peak_bytes
            self.activation_bytes = recording.record.peaks["activations"]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: torch's profiler runs once in a process, so a step that failed must end it."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()


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
