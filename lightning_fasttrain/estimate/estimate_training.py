"""Estimate a training before it runs: FLOPs, time, loss, batch size and memory."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveFloat, PositiveShare, check_arguments, one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import Report, ReportTable, explain, first_line, format_bytes
from lightning_fasttrain.estimate.flops import (
    StepFlops,
    count_parameters_by_part,
    count_step_flops,
    without_recomputation,
)
from lightning_fasttrain.estimate.memory_estimate import (
    MeasuredStep,
    Memory,
    formula_bytes,
    measure_step,
    measured_bytes,
    predicted_bytes,
)
from lightning_fasttrain.estimate.scaling_laws import (
    CHINCHILLA,
    REPLICATION,
    ScalingLaw,
    cost_of_batch_size,
    critical_batch_tokens,
    expected_loss,
    optimal_allocation,
    optimal_tokens,
    outside_of_range,
)
from lightning_fasttrain.memory.fake_step import Factory, fake_model
from lightning_fasttrain.memory.predict_memory import PRECISIONS, Loss
from lightning_fasttrain.proof.verification.verify import as_lightning_module
from lightning_fasttrain.step_time.accelerators import (
    Accelerator,
    energy_kwh,
    model_flops_utilization,
    pf_days,
    read_devices,
    training_hours,
)
from lightning_fasttrain.step_time.machine import machine_of
from lightning_fasttrain.step_time.predict_time import predict_time
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import find_with_surgery

Row = tuple[str, str, str]  # label, value, how it is known

_SUFFIXES = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_WRITTEN = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMbBtT]?)")


def format_count(count: float) -> str:
    """Format a number of parameters, tokens or samples as papers do.

    Example:
        >>> format_count(124_475_904), format_count(1.33e12), format_count(512)
        ('124M', '1.33T', '512')
    """
    for suffix, unit in _SUFFIXES:
        if count >= unit:
            return f"{count / unit:.3g}{suffix}"
    return f"{count:.3g}"


def read_count(name: str, text: str) -> float:
    """Parse a number with a suffix, as papers write it.

    Args:
        name: of the argument, for the error.
        text: as ``"10B"``, ``"1.5e9"``, ``"300_000"``.

    Raises:
        ValueError: it is not understood, or not above 0.

    Example:
        >>> read_count("--tokens", "10B"), read_count("--tokens", "1.4T"), read_count("--tokens", "2e6")
        (10000000000.0, 1400000000000.0, 2000000.0)
    """
    written = _WRITTEN.fullmatch(text.strip())
    units = {suffix.lower(): unit for suffix, unit in _SUFFIXES}
    count = float(written[1].replace("_", "")) * units.get(written[2].lower(), 1.0) if written else 0.0
    if not 0 < count < math.inf:
        why = "expected a number above 0, with k, M, B or T for thousands to trillions"
        raise ValueError(explain(f"{name} {text}", why, f"Write {name} 10B"))
    return count


@dataclass(frozen=True)
class Speed:
    """The speed of a training on its devices, and its time.

    Attributes:
        devices: how many.
        name: of the accelerator, or "this machine's cpu".
        peak_flops: FLOP/s of one.
        peak_source: where this is stated, or how it was measured.
        mfu: the fraction of the peak that is reached.
        mfu_source: whether it is assumed or measured, and how.
        per_s: tokens, or samples, per second of all devices together.
        hours: of the training.
        device_hours: hours times devices.
        energy_kwh: of the devices at full power; None if that is unknown.
    """

    devices: int
    name: str
    peak_flops: float
    peak_source: str
    mfu: float
    mfu_source: str
    per_s: float
    hours: float
    device_hours: float
    energy_kwh: float | None


@dataclass(frozen=True)
class LawEstimate:
    """The estimate of one scaling law.

    Attributes:
        law: its name.
        loss: expected, in nats per token.
        optimal_tokens: for the parameters of the model.
        budget_parameters: for the FLOPs of the training.
        budget_tokens: for the FLOPs of the training.
        outside: how far it is extrapolated; "" inside of the range of the fit.
        source: the paper.
    """

    law: str
    loss: float
    optimal_tokens: float
    budget_parameters: float
    budget_tokens: float
    outside: str
    source: str


@dataclass(frozen=True)
class TrainingEstimate(Report):
    """An estimate of a training; print it for a table.

    Attributes:
        parameters: part of the model → number of parameters.
        flops: of a step on one device.
        length: tokens of the training, or samples of a model without token ids.
        model_flops: of the training, without recomputation.
        pf_days: the same in petaflop/s-days.
        speed: on its devices.
        laws: estimates of scaling laws; empty for models without token ids.
        critical_batch: in tokens or samples; None if unknown.
        critical_source: where that is from.
        memory: what → (bytes of one device, how they are known).
        measured: the step on this machine, if it was measured.
        notes: assumptions and omissions.
    """

    parameters: Mapping[str, int]
    flops: StepFlops
    length: float
    model_flops: float
    pf_days: float
    speed: Speed
    laws: tuple[LawEstimate, ...]
    critical_batch: float | None
    critical_source: str
    memory: Mapping[str, tuple[float, str]]
    measured: MeasuredStep | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def batch(self) -> float:
        """Tokens or samples of an optimizer step, with one batch on each device."""
        return float(self.flops.tokens * self.speed.devices)

    @property
    def steps(self) -> float:
        """Optimizer steps of the training."""
        return self.length / self.batch

    @property
    def batch_costs(self) -> tuple[float, float] | None:
        """Steps relative to the fewest, and data relative to the least, with this batch; None if unknown."""
        return None if self.critical_batch is None else cost_of_batch_size(self.batch, self.critical_batch)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the FLOPs by part; sizes are in bytes."""
        parts = {"6 N": self.flops.six_n, **self.flops.parts()}
        derived = {"batch": self.batch, "steps": self.steps, "batch_costs": self.batch_costs}
        return {**asdict(self), **derived, "flops_by_part": parts}

    def as_table(self) -> ReportTable:
        """Build the table: what, how much, and how that is known."""
        title = (
            f"Training of {format_count(self.flops.parameters)} parameters on {format_count(self.length)} {self._units}"
        )
        table = ReportTable(title, {"": "name", "value": "number", "how it is known": "prose"}, self.notes)
        sections = (
            self._parameter_rows,
            self._flops_rows,
            self._time_rows,
            self._law_rows,
            self._batch_rows,
            self._memory_rows,
        )
        for rows in sections:
            for row in rows():
                table.add(*row)
            table.add_section()
        return table

    @property
    def _units(self) -> str:
        return f"{self.flops.unit}s"

    def _parameter_rows(self) -> Iterator[Row]:
        yield "parameters, N", f"{self.flops.parameters:,}", "counted, tied ones once"
        for part, count in self.parameters.items():
            yield f"  {part}", f"{count:,}", f"{count / self.flops.parameters:.1%}"

    def _flops_rows(self) -> Iterator[Row]:
        flops, unit = self.flops, self.flops.unit
        how = f"counted by torch on a batch of {flops.tokens:,} {self._units}, without recomputation"
        yield f"FLOPs per {unit}", f"{flops.flops_per_token:.4g}", how
        yield "  6 N", f"{6 * flops.parameters:.4g}", f"{flops.six_n / flops.counted:.1%} of the count"
        for part, difference in flops.parts().items():
            if difference:
                yield f"  {part}", f"{difference / flops.tokens:+.4g}", f"{difference / flops.counted:+.1%}"
        if flops.recomputed:
            share = f"{flops.recomputed / flops.counted:+.1%}, not counted in MFU"
            yield "  recomputed by techniques, besides", f"{flops.recomputed / flops.tokens:+.4g}", share
        yield "FLOPs of the training", f"{self.model_flops:.4g}", f"{self.pf_days:,.4g} PF-days (1e15 FLOP/s for a day)"

    def _time_rows(self) -> Iterator[Row]:
        speed = self.speed
        yield "peak FLOP/s of a device", f"{speed.peak_flops:.4g}", f"{speed.name}: {speed.peak_source}"
        yield "MFU", f"{speed.mfu:.1%}", speed.mfu_source
        yield (
            f"{self._units} per second",
            f"{speed.per_s:,.4g}",
            f"{speed.devices} × peak × MFU / FLOPs per {self.flops.unit}",
        )
        yield "steps", f"{self.steps:,.0f}", f"of {format_count(self.batch)} {self._units}: one batch on each device"
        days = f"{speed.hours / 24:,.3g} days" if speed.hours >= 48 else ""
        yield "hours", f"{speed.hours:,.4g}", days
        yield "device hours", f"{speed.device_hours:,.4g}", f"{speed.devices} × {speed.name}"
        if speed.energy_kwh is not None:
            yield "energy, kWh", f"{speed.energy_kwh:,.4g}", "devices at full power, without hosts, network and cooling"

    def _law_rows(self) -> Iterator[Row]:
        if not self.laws:
            return
        yield f"{self._units} per parameter", f"{self.length / self.flops.parameters:,.3g}", ""
        for one in self.laws:
            yield (
                f"{one.law}: expected loss",
                f"{one.loss:.3f}",
                one.outside or "nats per token, within the range of the fit",
            )
            optimal = f"{one.optimal_tokens / self.flops.parameters:,.3g} per parameter"
            yield "  compute-optimal tokens for N", format_count(one.optimal_tokens), optimal
            best = f"{format_count(one.budget_parameters)} × {format_count(one.budget_tokens)}"
            yield "  best N × tokens for this budget", best, one.source.partition(", https")[0]

    def _batch_rows(self) -> Iterator[Row]:
        if self.critical_batch is None or self.batch_costs is None:
            return
        yield f"critical batch, {self._units}", format_count(self.critical_batch), self.critical_source
        steps, data = self.batch_costs
        costs = f"{steps:.3g} × the fewest steps, {data:.3g} × the least data (McCandlish et al. 2018)"
        yield f"this batch, {self._units}", format_count(self.batch), costs

    def _memory_rows(self) -> Iterator[Row]:
        for what, (nbytes, how) in self.memory.items():
            yield what, format_bytes(nbytes), how


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
    larger than this machine: time is that of :func:`~lightning_fasttrain.predict_time`, under DDP if it fits and else
    under FSDP2, or of the accelerator's peak times a given MFU. Without it, a few steps run
    on copies of the model on this machine, and MFU is measured. Each value of the report states how it is known.

    Args:
        module: a function that builds the model, or the model, which is not changed.
        batch: one batch of the loader, as one device sees it.
        length: tokens of the training, each seen once; samples, for batches without token ids.
        gpu: an accelerator of :func:`~lightning_fasttrain.estimate.find_accelerator` and their number, as ``"H100:8"``;
            or one :class:`~lightning_fasttrain.estimate.Accelerator`. None to measure on this machine.
        mfu: of that accelerator; by default that of the predicted step, or 0.4 where it cannot be predicted.
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
    with fake_model(module, without_recomputation(find_with_surgery(techniques, PredictedStep()))) as net:
        parts = count_parameters_by_part(net)
    notes: list[str] = []
    memory: Memory = {}
    measured = None
    if gpu is None:
        measured = measure_step(as_lightning_module(module, loss, optimizer), batch, precision, techniques)
        speed = _speed_here(flops, length, measured)
    else:
        accelerator, devices = (gpu, 1) if isinstance(gpu, Accelerator) else read_devices(gpu)
        settings = {"techniques": techniques, "precision": precision, "loss": loss, "optimizer": optimizer}
        how = "assumed, as given"
        if mfu is None:
            mfu, how = _predict_mfu(module, batch, accelerator, devices, flops, settings)
        speed = _speed_on(accelerator, devices, flops, length, mfu, how)
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


def _predict_mfu(
    module: nn.Module | Factory,
    batch: object,
    accelerator: Accelerator,
    devices: int,
    flops: StepFlops,
    settings: dict[str, Any],
) -> tuple[float, str]:
    """Return the MFU of a predicted step, under DDP if it fits and else under FSDP2, and how it is known.

    Where the step cannot be predicted, such as without an optimizer, an MFU is assumed.
    """
    machine = machine_of(accelerator)
    nodes = max(1, devices // machine.devices_per_node)
    if devices % nodes:
        nodes = 1
    settings = {**settings, "devices": devices, "nodes": nodes, "machine": machine}
    strategy, under = ("ddp", " under DDP") if devices > 1 else (None, "")
    try:
        report = predict_time(module, batch, strategy=strategy, **settings)
        if devices > 1 and not report.fits:
            report, under = predict_time(module, batch, strategy=FSDP2Strategy(), **settings), " under FSDP2"
    except (TypeError, ValueError) as error:
        return ASSUMED_MFU, f"assumed, since time is not predicted: {first_line(error)}; {_PUBLISHED}"
    how = f"predicted{under}: {report.seconds * 1e3:,.4g} ms/step, {report.low * 1e3:,.4g} to {report.high * 1e3:,.4g}"
    per_s = flops.tokens * devices / report.seconds
    return model_flops_utilization(per_s, flops.flops_per_token, accelerator.flops, devices), how


def _speed_on(accelerator: Accelerator, devices: int, flops: StepFlops, length: float, mfu: float, how: str) -> Speed:
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
