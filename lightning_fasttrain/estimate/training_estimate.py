"""The report of an estimate, for users and for programs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rich.table import Table

from lightning_fasttrain.core.messages import FULL_WIDTH, Report, explain, format_bytes, titled_table
from lightning_fasttrain.estimate.batch_size import cost_of_batch_size
from lightning_fasttrain.estimate.counted_flops import StepFlops
from lightning_fasttrain.estimate.measured_step import MeasuredStep

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

    width: ClassVar[int] = FULL_WIDTH

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

    def as_table(self) -> Table:
        """Build a ``rich`` table: what, how much, and how that is known."""
        title = (
            f"Training of {format_count(self.flops.parameters)} parameters on {format_count(self.length)} {self._units}"
        )
        table = titled_table(title, self.notes)
        table.add_column("")
        table.add_column("value", justify="right")
        table.add_column("how it is known", overflow="fold")
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
                table.add_row(*row)
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
