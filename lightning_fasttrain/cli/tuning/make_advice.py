"""Advise techniques for a step: plan, measure the best choices in turn, and verify the fastest."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_fasttrain.cli.tuning.advice import Advice
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import first_line
from lightning_fasttrain.doctor import Diagnosis
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.make_plan import make_plan
from lightning_fasttrain.planner.plan import (
    Plan,
    Tried,
    best_two_thirds,
    compare_turns,
    is_decided,
    simplest_of_equals_first,
)
from lightning_fasttrain.planner.timing import Stopwatch, compare_times
from lightning_fasttrain.proof.verification.report import Verification
from lightning_fasttrain.technique import Technique

_SILENCE = 15.0  # seconds after which a line says what still runs
SHARES = {"doctor": 0.15, "plan": 0.45}  # of the time; the rest is for measuring in turn
_RIVALS, _FEWEST_TURNS, _MOST_TURNS = 4, 3, 16
_SPREAD = 1.2  # of the bounds of the gain: it is known to about 10%


class Progress(threading.Thread):
    """Prints a line for each thing that begins, and another one whenever something takes long."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._began = self._since = time.monotonic()
        self._doing = ""
        self._said = threading.Event()
        self.start()

    def say(self, what: str) -> None:
        """Print what begins."""
        self._doing, self._since = what, time.monotonic()
        self._said.set()
        print(f"fasttrain tune: {time.monotonic() - self._began:.0f} s: {what}", file=sys.stderr, flush=True)

    def run(self) -> None:
        while True:
            self._said.clear()
            if not self._said.wait(_SILENCE) and self._doing:
                now = time.monotonic()
                seconds = f"{now - self._began:.0f} s: {self._doing}, for {now - self._since:.0f} s now"
                print(f"fasttrain tune: {seconds}", file=sys.stderr, flush=True)


@dataclass
class Tuning:
    """Orders of the command line, and the deadline.

    Attributes:
        memory: ``memory_gib`` of :func:`~lightning_fasttrain.make_plan`.
        keep: its ``keep``.
        seconds: time limit for measurements.
        progress: prints lines.
        began: when the time began.
    """

    memory: Any
    keep: str
    seconds: float
    progress: Progress
    began: float

    @classmethod
    def ordered(cls, memory: str, keep: str, seconds: float) -> "Tuning":
        """Return what the command line asks for, as it is in the environment."""
        limit: Any = memory if memory == "fit" else float(memory)
        kept = "changes_training" if keep == "anything" else keep
        # A choice that cannot be compiled is left out with one line, and not with the compiler's traceback.
        torch._logging.set_logs(all=logging.CRITICAL)
        return cls(limit, kept, seconds, Progress(), time.monotonic())

    def advise(
        self,
        watch: Stopwatch,
        precision: str,
        steps: int,
        loader: object,
        check: Callable[[list[Technique]], Verification],
    ) -> Advice:
        """Plan, measure the best choices in turn with the plain step, and verify the fastest.

        Args:
            watch: measures steps of the module.
            precision: of the script.
            steps: of its run.
            loader: of its batches; None if they are in none.
            check: verifies techniques.
        """
        settings = dict(watch.settings)
        # Only a run in float32 is offered another precision: whoever has set one has had a reason.
        kept = None if precision == "32-true" else precision
        planned_by = self.began + (SHARES["doctor"] + SHARES["plan"]) * self.seconds
        plan = make_plan(
            watch.module,
            watch.batch,
            self.memory,
            keep=self.keep,
            precision=kept,
            device=settings.pop("accelerator"),
            steps=steps,
            seconds=max(1.0, planned_by - time.monotonic()),
            loader=loader,
            tell=self.progress.say,
            **settings,
        )
        fitting = list_fitting(plan)
        times_ms = self.measure_in_turn(watch, list_rivals(plan, fitting))
        fastest, verified, refused = self.verify_fastest(rank(plan, times_ms, fitting), check)
        peaks: dict[Choice, float] = {plan.plain.choice: plan.plain.predicted_bytes}
        for choice in {plan.plain.choice, fastest} & times_ms.keys():
            self.progress.say(f"measuring the memory of {choice}")
            peaks[choice] = watch.time(choice, peak=True).peak_bytes
        advice = advice_of(plan, fastest, times_ms, peaks, verified)
        advice.notes.extend(refused)
        return advice

    def verify_fastest(
        self, ranked: Sequence[Choice], check: Callable[[list[Technique]], Verification]
    ) -> tuple[Choice, Verification | None, list[str]]:
        """Return the first choice whose training is the same, its verification, and why those before it are not used.

        If none is, it is the first one, as what would have been the fastest.
        """
        results: list[tuple[Choice, Verification | None]] = []
        refused: list[str] = []
        for choice in ranked:
            verified = None
            if choice.techniques():
                self.progress.say(f"verifying that the training is the same with {choice}")
                verified = check(choice.techniques())
            if is_same_training(verified):
                return choice, verified, refused
            results.append((choice, verified))
            refused.append(f"{choice} is not advised: {describe_verdict(verified)}.")
        return *results[0], []

    def measure_in_turn(self, watch: Stopwatch, rivals: list[Choice]) -> dict[Choice, list[float]]:
        """Measure a step of each of the choices in turn, until the fastest and its gain are known, or time is up.

        Whatever slows the machine for longer than a turn cancels in the ratios of its times. After each turn the worse
        third is out, until two are left beside the first, the plain step, which stays. A choice that fails is left
        out, as the plain step is that does not fit.

        Raises:
            Exception: all of them fail; the error is that of the last one.
        """
        times_ms: dict[Choice, list[float]] = {rival: [] for rival in rivals}
        plain, racing = rivals[0], list(rivals)
        for turn in range(_MOST_TURNS):
            self._run_each(watch, racing, times_ms, f"turn {turn + 1}")
            racing = [rival for rival in racing if rival in times_ms]
            enough = turn + 1 >= _FEWEST_TURNS
            is_late = time.monotonic() > self.began + self.seconds
            if not racing or (enough and (is_late or _is_known({rival: times_ms[rival] for rival in racing}, plain))):
                break
            others = [Tried(rival, 0.0, 0.0, tuple(times_ms[rival])) for rival in racing if rival != plain]
            kept = {tried.choice for tried in best_two_thirds(others)}
            racing = [rival for rival in racing if rival == plain or rival in kept]
        return times_ms

    def _run_each(self, watch: Stopwatch, racing: list[Choice], times_ms: dict[Choice, list[float]], turn: str) -> None:
        """Add a time of each choice to those known, and drop the times of one that fails."""
        for rival in racing:
            self.progress.say(f"{turn}: {rival}")
            try:
                times_ms[rival].append(watch.time(rival).ms)
            except Exception as error:
                self.progress.say(f"{rival} fails: {first_line(error)}")
                del times_ms[rival]
                if not times_ms:
                    raise


def _is_known(times_ms: Mapping[Choice, list[float]], plain: Choice) -> bool:
    """Return whether it is known which choice is the fastest, and what it gains on the plain step."""
    if plain not in times_ms:
        return is_decided(list(times_ms.values()))
    gain = compare_times(min(times_ms.values(), key=min), times_ms[plain])
    return gain.high <= _SPREAD * gain.low and is_decided(list(times_ms.values()))


def list_fitting(plan: Plan) -> list[Choice]:
    """Return the choices of a plan that fit: the planned one, what may be better, and the next best ones.

    The gain of compiled blocks was perhaps assumed, and they are slower where they draw dropout on a CPU. If the plan
    has none, their time to compile did not pay. A fused head takes less memory, and may be faster.
    """
    chosen = plan.chosen.choice
    found = [chosen]
    untried = not any(tried.choice.head for tried in plan.tried)
    if untried and not any(name.startswith("head") for name in plan.left_out):
        found.append(replace(chosen, head="fused"))
    found += [replace(choice, compile="") for choice in reversed(found)]
    found.append(replace(chosen, layout=""))
    for tried in plan.tried:
        if tried.predicted_bytes <= plan.limit_gib * GIB and (chosen.compile or not tried.choice.compile):
            found.append(tried.choice)
    return list(dict.fromkeys(found))


def list_rivals(plan: Plan, fitting: list[Choice]) -> list[Choice]:
    """Return the plain step, and the choices that are worth measuring beside it."""
    wanted = dict.fromkeys(fitting)
    wanted.pop(plan.plain.choice, None)
    return [plan.plain.choice, *list(wanted)[:_RIVALS]]


def rank(plan: Plan, times_ms: Mapping[Choice, list[float]], fitting: Sequence[Choice]) -> list[Choice]:
    """Return the choices that fit, the fastest and simplest first; the plain step only if it is alone.

    Those that were measured in all turns come before the others.
    """
    plain = plan.plain.choice
    allowed = [choice for choice in times_ms if choice in fitting and choice != plain] or list(times_ms)
    ranked = [Tried(choice, 0.0, 0.0, tuple(times_ms[choice])) for choice in allowed]
    ranked.sort(key=lambda tried: tried.ms)
    most = max(len(tried.step_ms) for tried in ranked)
    to_the_end = [tried for tried in ranked if len(tried.step_ms) == most]
    others = [tried for tried in ranked if len(tried.step_ms) < most]
    return [tried.choice for tried in (*simplest_of_equals_first(to_the_end), *others)]


def is_same_training(verified: Verification | None) -> bool:
    """Whether the steps are the same; problems of the script itself, such as a first learning rate of 0, do not count.

    Without a row nothing could be compared.
    """
    if verified is None:
        return True
    return bool(verified.rows) and all(row.ok for row in verified.rows)


def describe_verdict(verified: Verification | None) -> str:
    """Return why nothing could be compared, or how near the training is."""
    if verified is None:
        return ""
    if verified.rows:
        return verified.rows[0].verdict
    return " ".join(verified.problems).rstrip(".")


def advice_of(
    plan: Plan,
    choice: Choice,
    times_ms: Mapping[Choice, list[float]],
    peaks: Mapping[Choice, float],
    verified: Verification | None,
) -> Advice:
    """Return the advice to use a choice."""
    plain = plan.plain.choice
    gain, before_ms = (1.0, 1.0, 1.0), 0.0
    if plain in times_ms:
        ratio, before_ms = compare_turns(times_ms[choice], times_ms[plain]), min(times_ms[plain])
        gain = ratio.value, ratio.low, ratio.high
    precision = choice.precision if choice.precision != plain.precision else None
    verdicts: list[str] = []
    if verified is not None:
        verdicts.append(f"{describe_verdict(verified)}, as verified on the first batches")
    if precision is not None:
        verdicts.append(f"{precision} rounds products to 16 bits")
    points: list[dict[str, Any]] = []
    for tried in plan.tried:
        ms = min(times_ms.get(tried.choice, []), default=tried.ms)
        nbytes = peaks.get(tried.choice) or tried.peak_bytes or tried.predicted_bytes
        measured = bool(tried.step_ms) or tried.choice in times_ms
        points.append({"name": str(tried.choice), "ms": ms, "bytes": nbytes, "measured": measured})
    return Advice(
        before_ms=before_ms,
        after_ms=min(times_ms[choice]),
        gain=gain,
        before_bytes=peaks[plain],
        after_bytes=peaks[choice],
        techniques=list(choice.code()),
        precision=precision,
        reasons=list(plan.reasons) if choice == plan.chosen.choice else [],
        notes=[*plan.notes, "Times are of steps on the first batch, without data loading and other callbacks."],
        verdict=". ".join(verdicts),
        is_same=is_same_training(verified),
        replaced=[],
        yaml=replace(plan, chosen=replace(plan.chosen, choice=choice)).yaml(),
        points=points,
    )


# What the plan has measured.
_LEAST_SHARE = 0.03  # of a step, for a finding to be named
_PLANNED = ("bf16", "tf32", "channels_last", "logits", "attention")


def with_diagnosis(advice: Advice, diagnosis: Diagnosis) -> Advice:
    """Return the advice with the doctor's shares and findings."""
    findings: list[tuple[float, str, str]] = []
    for finding in diagnosis.findings:
        share = finding.share_of(diagnosis.step_ms)
        # Where nothing was planned, the doctor alone knows of them.
        is_planned = bool(advice.points) and finding.kind in _PLANNED
        costs_memory = finding.cost is not None and finding.cost.unit == "bytes"
        if not is_planned and (finding.cost is None or share >= _LEAST_SHARE or costs_memory):
            findings.append((share, finding.what, finding.cure))
    if any(finding.kind == "padding" for finding in diagnosis.findings):
        advice.notes[:] = [note for note in advice.notes if "seem to be padding" not in note]
    return replace(advice, costs=diagnosis.list_costs(), findings=findings)
