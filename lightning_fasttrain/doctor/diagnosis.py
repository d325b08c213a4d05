"""The diagnosis of a run: its findings, the most expensive first, and the times that they rest on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from lightning_fasttrain.core.messages import Report, format_ms, number_of, titled_table
from lightning_fasttrain.doctor.finding import Finding
from lightning_fasttrain.doctor.observation.measured import LineTime
from lightning_fasttrain.profiling.memory_record import MemoryRecord

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
        lines: the lines of the user's code that took longest, with their phases.
        block_ms: time of the forward of each block.
        memory: the memory of one step; None if it was not recorded.
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
    memory: MemoryRecord | None = None

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
            "memory": _memory_as_dict(self.memory),
            "notes": list(self.notes),
        }

    def as_table(self) -> Table:
        phases = ", ".join(
            f"{name} {format_ms(ms)}" for name, ms in self.phase_ms.items() if ms >= LEAST_SHARE * self.step_ms
        )
        title = f"fasttrain doctor: {format_ms(self.step_ms)} ms/step on {self.device} ({phases} ms)"
        table = titled_table(escape(title), map(escape, (*self._summary(), *self.notes)))
        for column in ("cost", "where", "what was found", "cure"):
            table.add_column(column, overflow="fold")
        for finding in self.findings:
            where = "" if finding.line is None else str(finding.line)
            what = "\n".join([finding.what, *finding.details])
            cure = f"{finding.cure}\n({finding.exactness})"
            table.add_row(*map(escape, (describe_cost(finding, self.step_ms), where, what, cure)))
        if not self.findings:
            table.add_row("none", "", "Nothing was found that costs at least 1% of a step, memory, or accuracy", "")
        return table

    def _summary(self) -> list[str]:
        if not self.minor:
            return []
        return [f"{number_of(len(self.minor), 'finding')} below 1% of a step not shown"]


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
