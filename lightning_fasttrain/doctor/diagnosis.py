"""A diagnosis: findings in the order of what they cost, with the times that they were judged by."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_fasttrain.core.messages import Report, ReportTable, format_bytes, format_ms, number_of
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
from lightning_fasttrain.doctor.observation.step_records import LineTime
from lightning_fasttrain.planner.timing import Ratio, compare_times
from lightning_fasttrain.profiling.memory_record import MemoryRecord


@dataclass(frozen=True)
class Cost:
    """The cost of a finding in each step, with the interval that contains it with a confidence of 95%.

    Attributes:
        value, low, high: the cost and its interval.
        unit: "ms" or "bytes", of a step; "" if it was not measured.
        is_gain: whether the cure was tried and this is the measured gain, rather than the measured cost.
    """

    value: float
    low: float
    high: float
    unit: str = "ms"
    is_gain: bool = False

    @classmethod
    def unmeasured(cls) -> "Cost":
        """Return the cost of what is known to cost time, and was not measured."""
        return cls(0.0, 0.0, 0.0, unit="")

    def __str__(self) -> str:
        if not self.unit:
            return "not measured"
        if self.unit == "bytes":
            return f"{format_bytes(self.value)}/step"
        return f"{format_ms(self.value)} ms/step ({format_ms(max(0.0, self.low))} to {format_ms(self.high)})"


def cost_of_ratio(base_ms: float, ratio: Ratio, *, is_gain: bool) -> Cost:
    """Return the cost that a step of ``base_ms`` would lose if it took ``ratio`` times as long.

    Example:
        >>> cost_of_ratio(10.0, Ratio(0.8, 0.75, 0.85), is_gain=True).value
        2.0
    """
    value, low, high = (base_ms * (1 - part) for part in (ratio.value, ratio.high, ratio.low))
    return Cost(round(value, 6), round(low, 6), round(high, 6), is_gain=is_gain)


def cost_of_phase(step_ms: Sequence[float], phase_ms: Sequence[float]) -> Cost:
    """Return the cost of a phase from the times of the steps and of the phase in each of them.

    Example:
        >>> round(cost_of_phase([10.0, 10.0, 10.0], [4.0, 4.0, 4.0]).value, 3)
        4.0
    """
    without = []
    for step, phase in zip(step_ms, phase_ms, strict=True):
        without.append(max(step - phase, 1e-6))
    return cost_of_ratio(statistics.median(step_ms), compare_times(step_ms, without), is_gain=False)


def cost_of_samples(ms: float, samples: int) -> Cost:
    """Return a cost that was measured by sampling the running line; the number of samples gives the interval.

    Args:
        ms: milliseconds of a step.
        samples: number of samples that hit the line.
    """
    # The standard deviation of a Poisson count is its square root.
    relative = 1.96 / max(samples, 1) ** 0.5
    return Cost(ms, max(0.0, ms * (1 - relative)), ms * (1 + relative))


def cost_of_calls(seconds: Sequence[float], steps: int) -> Cost:
    """Return the cost of calls that were timed one by one, spread over the steps in which they ran.

    Example:
        >>> cost_of_calls([0.01, 0.01], steps=4).value
        5.0
    """
    ms = 1e3 * sum(seconds) / steps
    # One call says nothing about its spread.
    half = ms
    if len(seconds) > 1:
        half = 1.96 * 1e3 * statistics.stdev(seconds) * len(seconds) ** 0.5 / steps
    return Cost(ms, max(0.0, ms - half), ms + half)


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    Attributes:
        kind: name of the fault, such as "host_sync"; stable, for programs.
        what: one sentence on what was seen, with its numbers.
        cure: one line that mends it.
        exactness: "exact", "to rounding", or what the cure changes about the training.
        line: the user's own line; None if none could be found.
        cost: what it costs in each step; None for a fault of the training itself, which costs accuracy instead.
        details: further sentences, such as the most expensive lines of a phase.
    """

    kind: str
    what: str
    cure: str
    exactness: str
    line: SourceLine | None = None
    cost: Cost | None = None
    details: tuple[str, ...] = ()

    def share_of(self, step_ms: float) -> float:
        """Return the share of a step's time that it costs; 0 where the cost is not a time."""
        if self.cost is None or self.cost.unit != "ms" or step_ms <= 0:
            return 0.0
        return self.cost.value / step_ms


# Phase → what a reader sees.
PHASE_NAMES = {
    "data_wait": "waiting for data",
    "transfer": "host to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "callbacks": "callbacks",
    "other": "everything else",
}

# Findings below this share of a step are counted, not shown.
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Diagnosis(Report):
    """Findings of the doctor, and the times that they rest on.

    Attributes:
        device: type of the device.
        steps: number of steps that were timed.
        step_ms: median time of a step.
        phase_ms: median time of each phase, in the order of a step; "other" is what lies between them.
        findings: the findings that cost at least 1% of a step, memory, or accuracy; the most expensive first.
        minor: the others.
        operator_ms: time of the operators of forward and backward by kind, such as "attention".
        lines: the lines of the user's code that took longest, with their phases.
        block_ms: time of the forward of each block.
        memory: the memory of one step; None if it was not recorded.
        needed_ms: what the kernels of a step take at the rates of ``compared_with``, by kind, with starting them and
            waiting for values; empty where no machine is known, or a note says why.
        compared_with: name of the machine whose rates these are.
        notes: what could not be looked at, and why.
    """

    device: str
    steps: int
    step_ms: float
    phase_ms: dict[str, float]
    findings: tuple[Finding, ...] = ()
    minor: tuple[Finding, ...] = ()
    lines: tuple[tuple[str, LineTime], ...] = ()
    notes: tuple[str, ...] = field(default=())
    block_ms: dict[str, float] = field(default_factory=dict)
    operator_ms: dict[str, float] = field(default_factory=dict)
    memory: MemoryRecord | None = None
    needed_ms: dict[str, float] = field(default_factory=dict)
    compared_with: str = ""

    def as_dict(self) -> dict[str, Any]:
        lines = [{"phase": phase, **_line_as_dict(one.line), "ms": one.ms} for phase, one in self.lines]
        return {
            "device": self.device,
            "steps": self.steps,
            "step_ms": self.step_ms,
            "phase_ms": self.phase_ms,
            "findings": _findings_as_dicts(self.findings, self.step_ms),
            "minor": _findings_as_dicts(self.minor, self.step_ms),
            "lines": lines,
            "block_ms": self.block_ms,
            "operator_ms": self.operator_ms,
            "memory": _memory_as_dict(self.memory),
            "needed_ms": self.needed_ms,
            "compared_with": self.compared_with,
            "notes": list(self.notes),
        }

    def list_costs(self) -> list[tuple[str, float]]:
        """Return what the time of a step goes to, the largest first: (what, ms).

        Forward and backward are divided among the operators in them; what these leave is Python and waiting.
        """
        computing_ms = self.phase_ms.get("forward", 0.0) + self.phase_ms.get("backward", 0.0)
        costs = {PHASE_NAMES[name]: ms for name, ms in self.phase_ms.items() if name not in ("forward", "backward")}
        operators_ms = sum(self.operator_ms.values())
        if not operators_ms:
            costs |= {PHASE_NAMES[name]: self.phase_ms.get(name, 0.0) for name in ("forward", "backward")}
        else:
            # They were timed in another step, which may have been slower than most.
            share = min(1.0, computing_ms / operators_ms)
            costs |= {kind: share * ms for kind, ms in self.operator_ms.items()}
            costs["Python between operators"] = computing_ms - share * operators_ms
        return sorted(costs.items(), key=lambda cost: -cost[1])

    def as_table(self) -> ReportTable:
        phases = ", ".join(
            f"{name} {format_ms(ms)}" for name, ms in self.phase_ms.items() if ms >= LEAST_SHARE * self.step_ms
        )
        title = f"fasttrain doctor: {format_ms(self.step_ms)} ms/step on {self.device} ({phases} ms)"
        notes = (*self._summary(), *self.notes)
        table = ReportTable(title, {"cost": "prose", "what was found, and its cure": "prose"}, notes)
        for finding in self.findings:
            where = [] if finding.line is None else [str(finding.line)]
            cure = f"Cure: {finding.cure} ({finding.exactness})"
            table.add(describe_cost(finding, self.step_ms), "\n".join([finding.what, *where, *finding.details, cure]))
        if not self.findings:
            table.add("none", "Nothing was found that costs at least 1% of a step, memory, or accuracy.")
        return table

    def _summary(self) -> list[str]:
        said = [self.compare_to_machine()] if self.needed_ms else []
        if self.minor:
            said.append(f"{number_of(len(self.minor), 'finding')} below 1% of a step not shown")
        return said

    def compare_to_machine(self) -> str:
        """Return a sentence on what the kernels of a step need on the machine, and what the rest of its time is."""
        needed = sum(self.needed_ms.values())
        kinds = ", ".join(f"{kind} {format_ms(ms)}" for kind, ms in self.needed_ms.items())
        said = f"{self.compared_with} could run these kernels in {format_ms(needed)} ms ({kinds})"
        rest = self.step_ms - needed
        if rest <= 0:
            return f"{said}, and the step takes less: its rates are too low for kernels of this size"
        waits = {name: self.phase_ms.get(name, 0.0) for name in ("data_wait", "transfer", "callbacks", "other")}
        shown = [
            f"{PHASE_NAMES[name]} {format_ms(ms)}" for name, ms in waits.items() if ms >= LEAST_SHARE * self.step_ms
        ]
        slower = rest - sum(waits.values())
        if slower >= LEAST_SHARE * self.step_ms:
            shown.append(f"kernels below its rates and gaps between them {format_ms(slower)}")
        return f"{said}; the step takes {format_ms(self.step_ms)} ms, with {', '.join(shown) or 'nothing else'}"


def describe_cost(finding: Finding, step_ms: float) -> str:
    """Return a cost with its share of the step, and whether it was measured by trying the cure."""
    cost = finding.cost
    if cost is None:
        return "accuracy"
    if cost.unit != "ms":
        return str(cost)
    tried = ", gain of the cure as tried" if cost.is_gain else ""
    return f"{cost} = {finding.share_of(step_ms):.0%} of the step{tried}"


def rank(findings: Iterable[Finding], step_ms: float) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings worth showing, faults of the training first and then by cost; and the minor ones."""
    shown: list[Finding] = []
    minor: list[Finding] = []
    for finding in findings:
        costs_time = finding.cost is not None and finding.cost.unit == "ms"
        if costs_time and finding.share_of(step_ms) < LEAST_SHARE:
            minor.append(finding)
        else:
            shown.append(finding)
    shown.sort(key=lambda finding: _order(finding, step_ms))
    minor.sort(key=lambda finding: _order(finding, step_ms))
    return tuple(shown), tuple(minor)


def _order(finding: Finding, step_ms: float) -> tuple[int, float]:
    if finding.cost is None:
        return 0, 0.0
    if finding.cost.unit == "bytes":
        return 1, -finding.cost.value
    if not finding.cost.unit:
        return 3, 0.0
    return 2, -finding.share_of(step_ms)


def _findings_as_dicts(findings: Iterable[Finding], step_ms: float) -> list[dict[str, Any]]:
    return [_finding_as_dict(finding, step_ms) for finding in findings]


def _finding_as_dict(finding: Finding, step_ms: float) -> dict[str, Any]:
    cost = None
    if finding.cost is not None:
        cost = {**vars(finding.cost), "share": finding.share_of(step_ms)}
    return {
        "kind": finding.kind,
        "what": finding.what,
        "cure": finding.cure,
        "exactness": finding.exactness,
        "line": None if finding.line is None else _line_as_dict(finding.line),
        "cost": cost,
        "details": list(finding.details),
    }


def _memory_as_dict(record: MemoryRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    largest = [{"category": one.category, "name": one.name, "bytes": one.nbytes} for one in record.holders()[:8]]
    return {"peak_bytes": record.peak_bytes, "at_peak": record.at_peak, "where": record.where, "largest": largest}


def _line_as_dict(line: object) -> dict[str, Any]:
    return {"file": line.file, "number": line.number, "text": line.text}


def most_expensive(lines: Sequence[tuple[str, LineTime]], count: int = 12) -> tuple[tuple[str, LineTime], ...]:
    """Return the lines that took longest."""
    return tuple(sorted(lines, key=lambda one: -one[1].ms)[:count])
