"""The callback of a script that is tuned: it plans for the run, verifies the plan, and ends the process."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.cli.rehearsal.rehearsed_script import RehearseAndEnd, end_script
from lightning_fasttrain.cli.rehearsal.run_script import RESULT
from lightning_fasttrain.cli.tune import TUNE
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.host.lightning import training_loader
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.planner.auto import count_batches
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.make_plan import make_plan
from lightning_fasttrain.planner.plan import Plan, is_decided
from lightning_fasttrain.planner.timing import Stopwatch, compare_times
from lightning_fasttrain.proof.rehearsal.context import RehearsalError, read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsing, is_rehearsing
from lightning_fasttrain.proof.rehearsal.run_copy import leaving_no_trace
from lightning_fasttrain.proof.rehearsal.stages import verify_run
from lightning_fasttrain.proof.verification.report import Verification
from lightning_fasttrain.proof.verification.short_run import quietly


def make_callbacks() -> list[L.Callback]:
    """Return the callback that Lightning adds to each Trainer of the script, through its entry points."""
    if is_rehearsing() or RESULT not in os.environ:
        return []
    return [TuneAndEnd(**json.loads(os.environ[TUNE]))]


class TuneAndEnd(RehearseAndEnd):
    """A plan for the run, measured on its first batch, and its verification, after which the process ends.

    Args:
        memory: ``memory_gib`` of :func:`~lightning_fasttrain.make_plan`, as text.
        keep: ``"exact"``, ``"tolerance"`` or ``"anything"``.
        seconds: time limit for measurements.
    """

    def __init__(self, memory: str, keep: str, seconds: float) -> None:
        super().__init__()
        self.memory: Any = memory if memory == "fit" else float(memory)
        self.keep = "changes_training" if keep == "anything" else keep
        self.seconds = seconds

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: plan and verify, and end the process."""
        try:
            with Rehearsing(), leaving_no_trace(trainer, pl_module):
                advice = self._advise(trainer, pl_module)
        except (RehearsalError, ValueError, TypeError) as error:
            end_script(True, {"ok": False, "error": str(error)})
        end_script(True, {"ok": True, "advice": advice})

    def _advise(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        run, precision, loader = self._run, str(trainer.precision), training_loader(trainer)
        assert run is not None
        if trainer.world_size > 1:
            way_out = "Use devices=1, and then fasttrain shard for the strategy"
            raise ValueError(explain(f"tuning on {trainer.world_size} ranks", "a plan is measured on one", way_out))
        run.share_equal_weights(pl_module)
        sample, validation = read_batches(trainer, 2, seconds=0.0)
        clipping = {name: value for name, value in run.settings.items() if name.startswith("gradient_clip")}
        device = trainer.strategy.root_device.type
        with run.module_with_transfer_hooks() as module, quietly():
            plan = make_plan(
                module,
                sample.first[0],
                self.memory,
                keep=self.keep,
                # Only a run in float32 is offered another precision: whoever has set one has had a reason.
                precision=None if precision == "32-true" else precision,
                device=device,
                steps=count_batches(trainer, loader),
                seconds=self.seconds / 2,
                loader=loader,
                tell=_say,
                **clipping,
            )
            watch = Stopwatch(module, sample.first[0], {"accelerator": device, **clipping})
            fitting = list_fitting(plan)
            times_ms = measure_in_turn(watch, list_rivals(plan, fitting), self.seconds / 2)
            allowed = [choice for choice in times_ms if choice in fitting]
            fastest = min(allowed or times_ms, key=lambda choice: min(times_ms[choice]))
            peaks: dict[Choice, float] = {plan.plain.choice: plan.plain.predicted_bytes}
            for choice in {plan.plain.choice, fastest} & times_ms.keys():
                peaks[choice] = watch.time(choice, peak=True).peak_bytes
        verified = None
        if fastest.techniques():
            _say("verifying")
            verified = verify_run(trainer, run, sample.first, validation, fastest.techniques())
        own = [type(technique).__name__ for technique in run.techniques]
        return advice_of(plan, fastest, times_ms, peaks, verified, own)


def _say(what: str) -> None:
    print(f"fasttrain tune: {what}", file=sys.stderr, flush=True)


_RIVALS, _FEWEST_TURNS, _MOST_TURNS = 3, 3, 8


def list_fitting(plan: Plan) -> list[Choice]:
    """Return the choices of a plan that fit: the planned one, it without compiled blocks, and the next best ones.

    The gain of compiled blocks was perhaps assumed, and they are slower where they draw dropout on a CPU.
    """
    others = [tried.choice for tried in plan.tried if tried.predicted_bytes <= plan.limit_gib * GIB]
    eager = replace(plan.chosen.choice, compile="")
    return list(dict.fromkeys([plan.chosen.choice, eager, *others]))


def list_rivals(plan: Plan, fitting: list[Choice]) -> list[Choice]:
    """Return the plain step, and the choices that are worth measuring beside it."""
    wanted = dict.fromkeys(fitting)
    wanted.pop(plan.plain.choice, None)
    return [plan.plain.choice, *list(wanted)[:_RIVALS]]


def measure_in_turn(watch: Stopwatch, rivals: list[Choice], seconds: float) -> dict[Choice, list[float]]:
    """Measure a step of each of the choices in turn, until it is decided which one is the fastest, or time is up.

    Whatever slows the machine for longer than a turn cancels in the ratios of its times. A choice that fails is left
    out, as the plain step is that does not fit.

    Raises:
        Exception: all of them fail; the error is that of the last one.
    """
    times_ms: dict[Choice, list[float]] = {rival: [] for rival in rivals}
    until = time.monotonic() + seconds
    for turn in range(_MOST_TURNS):
        for rival in list(times_ms):
            _say(f"turn {turn + 1}: {rival}")
            try:
                times_ms[rival].append(watch.time(rival).ms)
            except Exception as error:
                _say(f"{rival} fails: {first_line(error)}")
                del times_ms[rival]
                if not times_ms:
                    raise
        enough = turn + 1 >= _FEWEST_TURNS
        if enough and (is_decided(list(times_ms.values())) or time.monotonic() > until):
            break
    return times_ms


def advice_of(
    plan: Plan,
    choice: Choice,
    times_ms: Mapping[Choice, list[float]],
    peaks: Mapping[Choice, float],
    verified: Verification | None,
    replaced: Sequence[str],
) -> dict[str, Any]:
    """Return the fields of the advice to use a choice."""
    plain = plan.plain.choice
    gain, before_ms = (1.0, 1.0, 1.0), 0.0
    if plain in times_ms:
        ratio, before_ms = compare_times(times_ms[choice], times_ms[plain]), min(times_ms[plain])
        gain = ratio.value, ratio.low, ratio.high
    precision = choice.precision if choice.precision != plain.precision else None
    verdicts: list[str] = []
    if verified is not None:
        verdicts += [*verified.problems, f"{verified.rows[0].verdict}, as verified on the first batches"]
    if precision is not None:
        verdicts.append(f"{precision} rounds products to 16 bits")
    is_planned = choice == plan.chosen.choice
    return {
        "before_ms": before_ms,
        "after_ms": min(times_ms[choice]),
        "gain": gain,
        "before_bytes": peaks[plain],
        "after_bytes": peaks[choice],
        "techniques": list(choice.code()),
        "precision": precision,
        "reasons": list(plan.reasons) if is_planned else [],
        "notes": [*plan.notes, "Times are of steps on the first batch, without data loading and other callbacks."],
        "verdict": ". ".join(verdicts),
        "is_same": verified is None or verified.ok,
        "replaced": list(replaced),
        "yaml": replace(plan, chosen=replace(plan.chosen, choice=choice)).yaml(),
    }
