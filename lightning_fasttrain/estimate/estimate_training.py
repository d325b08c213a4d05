"""Estimate a training before it runs: FLOPs, time, loss, batch size and memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveFloat, PositiveShare, check_arguments, one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.estimate.accelerators import Accelerator, read_devices
from lightning_fasttrain.estimate.batch_size import critical_batch_tokens
from lightning_fasttrain.estimate.counted_flops import StepFlops, count_step_flops, without_recomputation
from lightning_fasttrain.estimate.measured_step import MeasuredStep, measure_step
from lightning_fasttrain.estimate.memory_estimate import Memory, formula_bytes, measured_bytes, predicted_bytes
from lightning_fasttrain.estimate.parameter_counts import count_parameters_by_part
from lightning_fasttrain.estimate.run_time import energy_kwh, model_flops_utilization, pf_days, training_hours
from lightning_fasttrain.estimate.scaling_laws import (
    CHINCHILLA,
    REPLICATION,
    ScalingLaw,
    expected_loss,
    optimal_allocation,
    optimal_tokens,
    outside_of_range,
)
from lightning_fasttrain.estimate.training_estimate import LawEstimate, Speed, TrainingEstimate
from lightning_fasttrain.memory.fake_step import Factory, fake_model
from lightning_fasttrain.memory.predict_memory import PRECISIONS, Loss
from lightning_fasttrain.proof.verification.verify import as_lightning_module
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import find_surgeons

ASSUMED_MFU = 0.4
_ON_LAWS = "Losses are those of language models trained from scratch, on the text and tokenizer of the paper."
_PUBLISHED = "published: 21% to 46% in table 3 of PaLM, 42% to 56% in table 5 of Korthikanti et al. 2022"


@check_arguments
def estimate_training(
    module: nn.Module | Factory,
    batch: object,
    length: PositiveFloat,
    *,
    gpu: str | Accelerator | None = None,
    mfu: PositiveShare | None = None,
    precision: str | None = None,
    critical_batch: PositiveFloat | None = None,
    techniques: Sequence[Technique] = (),
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> TrainingEstimate:
    """Estimate the FLOPs, time, energy, loss, batch size and memory of a training.

    FLOPs are counted on a step without computing it. With ``gpu`` nothing is computed at all, and the model may be far
    larger than this machine: time is that of the accelerator's peak times an assumed MFU. Without it, a few steps run
    on copies of the model on this machine, and MFU is measured. Each value of the report states how it is known.

    Args:
        module: a function that builds the model, or the model, which is not changed.
        batch: one batch of the loader, as one device sees it.
        length: tokens of the training, each seen once; samples, for batches without token ids.
        gpu: an accelerator of :func:`~lightning_fasttrain.estimate.find_accelerator` and their number, as ``"H100:8"``;
            or one :class:`~lightning_fasttrain.estimate.Accelerator`. None to measure on this machine.
        mfu: of that accelerator; by default 0.4.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``; by default bf16-mixed with ``gpu``, else 32-true.
        critical_batch: measured by :class:`~lightning_fasttrain.profiling.GradientNoiseScale`, in the unit of
            ``length``. By default that of Kaplan et al. at the expected loss.
        techniques: techniques of the run, for recomputed FLOPs and memory.
        loss: (module, batch) → loss, instead of ``training_step``.
        optimizer: parameters → optimizer, instead of ``configure_optimizers``.

    Returns:
        A report: print it for a table.

    Raises:
        TypeError: no model, or no loss; to measure: no optimizer.
        ValueError: an unknown accelerator or precision; ``mfu`` without ``gpu``; a batch without samples.

    Example:
        >>> import torch
        >>> def loss(net, ids):
        ...     return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        >>> net = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
        >>> ids = torch.zeros(4, 32, dtype=torch.long)
        >>> estimate = estimate_training(net, ids, 1e9, gpu="A100:2", loss=loss, optimizer=torch.optim.AdamW)
        >>> estimate.flops.flops_per_token, round(estimate.model_flops / 1e12)
        (9600.0, 10)

    Source:
        The functions of this subpackage, each with its own.
    """
    if mfu is not None and gpu is None:
        raise ValueError(explain(f"mfu={mfu} without gpu", "on this machine it is measured", 'Add gpu="H100"'))
    precision = one_of("precision", precision or ("32-true" if gpu is None else "bf16-mixed"), tuple(PRECISIONS))
    flops = count_step_flops(module, batch, loss=loss, techniques=techniques)
    with fake_model(module, without_recomputation(find_surgeons(techniques, PredictedStep()))) as net:
        parts = count_parameters_by_part(net)
    notes: list[str] = []
    memory: Memory = {}
    measured = None
    if gpu is None:
        measured = measure_step(as_lightning_module(module, loss, optimizer), batch, precision, techniques)
        speed = _speed_here(flops, length, measured)
    else:
        accelerator, devices = (gpu, 1) if isinstance(gpu, Accelerator) else read_devices(gpu)
        speed = _speed_on(accelerator, devices, flops, length, mfu)
        memory["memory of a device"] = accelerator.memory_gib * GIB, "of its data sheet; CUDA itself takes part of it"
        notes += _notes_on(accelerator, precision)
    laws = _by_laws(flops, length)
    notes += [_ON_LAWS] if laws else []
    critical = (critical_batch, "measured, as given") if critical_batch is not None else _critical_by_law(laws)
    device = "cuda" if measured is None else measured.device
    try:
        memory |= predicted_bytes(module, batch, precision, techniques, loss, optimizer, device)
    except (TypeError, ValueError) as error:
        notes.append(f"Memory is not predicted: {str(error).partition(chr(10))[0]}")
    memory |= formula_bytes(flops, batch)
    memory |= {} if measured is None else measured_bytes(measured)
    model_flops = flops.flops_per_token * length
    return TrainingEstimate(
        parameters=parts,
        flops=flops,
        length=length,
        model_flops=model_flops,
        pf_days=pf_days(model_flops),
        speed=speed,
        laws=laws,
        critical_batch=critical[0],
        critical_source=critical[1],
        memory=memory,
        measured=measured,
        notes=tuple(notes),
    )


def _speed_here(flops: StepFlops, length: float, measured: MeasuredStep) -> Speed:
    per_s = flops.tokens / measured.ms * 1e3
    mfu = model_flops_utilization(per_s, flops.flops_per_token, measured.peak_flops)
    how = f"measured here: {measured.ms:,.4g} ms/step, the fastest of {measured.steps}"
    hours = length / per_s / 3600
    name, peak = f"this machine's {measured.device}", "measured: a large matrix product"
    return Speed(1, name, measured.peak_flops, peak, mfu, how, per_s, hours, hours, None)


def _speed_on(accelerator: Accelerator, devices: int, flops: StepFlops, length: float, mfu: float | None) -> Speed:
    how = f"assumed; {_PUBLISHED}" if mfu is None else "assumed, as given"
    mfu = ASSUMED_MFU if mfu is None else mfu
    hours = training_hours(flops.flops_per_token * length, accelerator.flops, devices, mfu)
    energy = None if accelerator.watts is None else energy_kwh(hours * devices, accelerator.watts)
    per_s = length / hours / 3600
    return Speed(
        devices,
        accelerator.name,
        accelerator.flops,
        accelerator.source,
        mfu,
        how,
        per_s,
        hours,
        hours * devices,
        energy,
    )


def _notes_on(accelerator: Accelerator, precision: str) -> Iterator[str]:
    if precision == "32-true":
        yield f"The peak is that of {accelerator.dtype}; products of 32-true take at least twice as long, also in TF32."
    elif accelerator.dtype == "float16":
        yield f"{accelerator.name} has no bfloat16: train it with precision='16-mixed', at the peak of float16."


def _by_laws(flops: StepFlops, length: float) -> tuple[LawEstimate, ...]:
    """Return the estimates of both laws; none without token ids, for the laws are those of language models."""
    if flops.unit != "token":
        return ()
    return tuple(_by_law(law, flops.parameters, length) for law in (REPLICATION, CHINCHILLA))


def _by_law(law: ScalingLaw, parameters: int, tokens: float) -> LawEstimate:
    best = optimal_allocation(6 * parameters * tokens, law)
    outside = outside_of_range(parameters, tokens, law)
    loss, optimal = expected_loss(parameters, tokens, law), optimal_tokens(parameters, law)
    return LawEstimate(law.name, loss, optimal, *best, outside, law.source)


def _critical_by_law(laws: tuple[LawEstimate, ...]) -> tuple[float | None, str]:
    if not laws:
        return None, ""
    kind = "an extrapolated" if laws[0].outside else "the expected"
    how = f"Kaplan et al. 2020 at {kind} loss; profiling.GradientNoiseScale() measures it on your run"
    return critical_batch_tokens(laws[0].loss), how
