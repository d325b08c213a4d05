"""The result of tuning a script, and how it is shown on one screen."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fasttrain.cli.tuning.apply_advice import find_keyword, find_trainer

_SLOWER = 0.8  # an interval that begins below it does not exclude that a step is clearly slower
_NOISE = 0.03  # of a step's time: a gain below it, or one whose interval contains 1, is none
_LEAST_SHARE = 0.03  # of a step, for a cost to be named
_MOST_COSTS, _MOST_FINDINGS = 6, 3
_WAIT = "waiting for data"


@dataclass(frozen=True)
class Advice:
    """Result of tuning a script.

    Attributes:
        before_ms, after_ms: time of a step of the script as it is, 0 if that does not fit, and as advised, measured in
            turn. Techniques of the script are left out of the first.
        gain: how many times as fast, and the ends of the interval that contains it with a confidence of 95%.
        before_bytes, after_bytes: peak memory of a step.
        techniques: Python that makes each technique; empty if none gains anything.
        precision: the Trainer's precision; None to leave it.
        reasons: what each of them contributes.
        notes: about the loader, padding and the optimizer.
        verdict: whether the steps with the techniques are those without.
        is_same: whether they are, within what the techniques promise.
        replaced: techniques of the script, instead of which the others were measured.
        yaml: the same for LightningCLI.
        costs: what a step of the script spends its time on, in ms, the largest first; with loader and callbacks.
        findings: what else the doctor saw: (share of the step, what, cure).
        points: the combinations that were considered: name, ms, bytes, and whether the time was measured.
        lines: for a loop of its own, what to write there; None for a Trainer.
    """

    before_ms: float
    after_ms: float
    gain: tuple[float, float, float]
    before_bytes: float
    after_bytes: float
    techniques: list[str]
    precision: str | None
    reasons: list[str]
    notes: list[str]
    verdict: str
    is_same: bool
    replaced: list[str]
    yaml: str
    costs: list[tuple[str, float]] = field(default_factory=list)
    findings: list[tuple[float, str, str]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] | None = None

    @property
    def is_worth_it(self) -> bool:
        """Whether the steps are the same training, and faster, or in clearly less memory and not slower."""
        faster = self.gain_with_wait > 1 + _NOISE and self.gain[1] > 1
        leaner = self.after_bytes < 0.9 * self.before_bytes and self.gain[0] > 1 - _NOISE and self.gain[1] > _SLOWER
        return self.is_same and (faster or leaner)

    @property
    def gain_with_wait(self) -> float:
        """The gain of steps with their wait for data, which stays as it is."""
        wait = dict(self.costs).get(_WAIT, 0.0) / (sum(ms for _, ms in self.costs) or 1.0)
        return 1 / (wait + (1 - wait) / self.gain[0])

    def list_shares(self) -> list[tuple[str, float]]:
        """Return the largest costs of a step with their shares."""
        total = sum(ms for _, ms in self.costs) or 1.0
        shares = [(what, ms / total) for what, ms in self.costs]
        return [(what, share) for what, share in shares if share >= _LEAST_SHARE][:_MOST_COSTS]


def describe(advice: Advice, script: Path) -> str:
    """Return one screen: what a step takes, what is advised, what it gains, and the change of the script."""
    from lightning_fasttrain.core.messages import align, output_width, wrap

    shown: list[str] = []
    for line in align(f"fasttrain tune {script}", list_facts(advice)).splitlines():
        shown += wrap(line, output_width(), hanging=" " * 19)
    shown.append("")
    sentences = [*(advice.reasons if advice.is_worth_it else []), *list_findings(advice), *advice.notes]
    for sentence in sentences:
        shown += wrap(sentence, output_width(), hanging="  ")
    if advice.is_worth_it:
        shown += ["", *describe_change(script, advice)]
    return "\n".join(shown).rstrip()


def list_facts(advice: Advice) -> list[tuple[str, str]]:
    """Return the facts of an advice: (label, fact)."""
    from lightning_fasttrain.core.messages import format_bytes, format_ms

    rows: list[tuple[str, str]] = []
    if advice.costs:
        shares = ", ".join(f"{what} {share:.0%}" for what, share in advice.list_shares())
        rows.append(("Time goes to", f"{shares} of {format_ms(sum(ms for _, ms in advice.costs))} ms"))
    peak = f"peak memory {format_bytes(advice.before_bytes)}"
    before = f"{advice.before_ms:,.4g} ms/step, {peak}" if advice.before_ms else f"does not fit: predicted {peak}"
    if advice.before_bytes:
        rows.append(("Without techniques" if advice.replaced else "Script as it is", before))
    if not advice.is_worth_it:
        rows.append(("Advised", f"nothing: {_explain_nothing(advice)}"))
    else:
        value, low, high = advice.gain
        names = [*([advice.precision] if advice.precision else []), *advice.techniques]
        times = advice.before_bytes / advice.after_bytes
        gained = f", {value:.2f} times as fast ({low:.2f} to {high:.2f}, in turn)" if advice.before_ms else ""
        if gained and _WAIT in dict(advice.list_shares()):
            gained += f"; with the wait for data {advice.gain_with_wait:.2f}"
        less = f"{times:.1f} times less" if times > 1.05 else f"×{1 / times:.2f}"
        rows += [
            ("Advised", ", ".join(names)),
            ("Time", f"{advice.after_ms:,.4g} ms/step{gained}"),
            ("Peak memory", f"{format_bytes(advice.after_bytes)}, {less}"),
            ("Same training", advice.verdict),
        ]
    if advice.replaced:
        rows.append(("Instead of", ", ".join(advice.replaced)))
    return rows


def list_findings(advice: Advice) -> list[str]:
    """Return a sentence on each finding of the doctor, with what to change."""
    found: list[str] = []
    for share, what, cure in advice.findings[:_MOST_FINDINGS]:
        found.append(f"{share:.0%} of the step: {what}. {cure}." if share else f"{what}. {cure}.")
    return found


def _explain_nothing(advice: Advice) -> str:
    if advice.techniques and not advice.is_same:
        return f"with {', '.join(advice.techniques)} it would be another training ({advice.verdict})"
    value, low, high = advice.gain
    if low < _SLOWER and value > 1 + _NOISE:
        return (
            f"the times vary too much to tell, {value:.2f} times as fast is from {low:.2f} to {high:.2f}: give more "
            "--minutes, or a quieter machine"
        )
    shares = advice.list_shares()
    if shares and shares[0][0] == _WAIT:
        return f"your step waits for data {shares[0][1]:.0%} of its time, see below"
    none = "no technique that keeps the training makes a step faster or leaner by more than the variation of its time"
    if advice.lines is not None:
        none = "the step is in a loop of your own, on which techniques cannot be tried"
    return f"{none}; the most goes to {shares[0][0]}, {shares[0][1]:.0%}" if shares else none


def describe_change(script: Path, advice: Advice) -> list[str]:
    """Return the lines to change, with the line of the script's Trainer where there is a single one."""
    if advice.lines is not None:
        return advice.lines
    source = script.read_text()
    if "LightningCLI" in source:
        return ["In the configuration:", "", *advice.yaml.splitlines()]
    call = find_trainer(source)
    where = "where the Trainer is made:" if call is None else f"in line {call.lineno} of {script}:"
    settings = [f"precision={advice.precision!r}"] if advice.precision else []
    others = ", ..." if call is not None and find_keyword(call, "callbacks") is not None else ""
    if advice.techniques:
        settings.append(f"callbacks=[{', '.join(advice.techniques)}{others}]")
    imports = ["import lightning_fasttrain as ft", ""] if advice.techniques else []
    return [*imports, where, f"  L.Trainer(..., {', '.join(settings)})"]
