"""Tune a script in its own process: watch its step, plan for it, measure in turn, verify, and end the process."""

import copy
import functools
import importlib
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.cli.rehearsal.rehearsed_script import RehearseAndEnd, end_script
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, end_process
from lightning_fasttrain.cli.tuning.tune import TUNE, Advice
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.host.lightning import plain_optimizer, training_loader
from lightning_fasttrain.core.messages import describe_error, first_line
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor import Diagnosis, Doctor, Examination, examine
from lightning_fasttrain.planner.auto import count_batches
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.make_plan import make_plan
from lightning_fasttrain.planner.plan import Plan, Tried, is_decided, simplest_of_equals_first
from lightning_fasttrain.planner.timing import Stopwatch, compare_times
from lightning_fasttrain.proof.rehearsal.context import RehearsalError, read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsing, is_rehearsing
from lightning_fasttrain.proof.rehearsal.run_copy import RunCopy, leaving_no_trace, one_device_again
from lightning_fasttrain.proof.rehearsal.stages import verify_run
from lightning_fasttrain.proof.verification.report import Verification
from lightning_fasttrain.proof.verification.short_run import EnoughError, quietly
from lightning_fasttrain.proof.verification.verify import as_lightning_module, verify
from lightning_fasttrain.technique import Technique

_SILENCE = 15.0  # seconds after which a line says what still runs
_WATCHED, _WARMUP = 20, 2  # steps that the doctor watches; fewer of long ones
_SHARES = {"doctor": 0.15, "plan": 0.45}  # of the time; the rest is for measuring in turn


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


def make_callbacks() -> list[L.Callback]:
    """Return the callback that Lightning adds to each Trainer of the script, through its entry points."""
    if is_rehearsing() or RESULT not in os.environ:
        return []
    _write_no_logs()
    return [TuneAndEnd(**json.loads(os.environ[TUNE]))]


class _NoLogger(DummyLogger):
    """Logs nothing; what asks for its folder gets one that is removed with the command's result."""

    @property
    def save_dir(self) -> str:
        return str(Path(os.environ[RESULT]).parent / "logs")


@functools.cache
def _write_no_logs() -> None:
    """Have Trainers fit without their loggers, which create folders before any callback is called."""
    original = L.Trainer.fit

    @functools.wraps(original)
    def fit(trainer: L.Trainer, *arguments: Any, **named: Any) -> Any:
        if trainer.loggers:
            trainer.loggers = [_NoLogger()]
        return original(trainer, *arguments, **named)

    patch(L.Trainer, "fit", fit)


def run_tuned() -> None:
    """Run the script that ``sys.argv`` names; a loop of its own is watched until a Trainer fits, if one does."""
    sys.argv = sys.argv[1:]
    script = str(Path(sys.argv[0]).resolve())
    sys.path[0] = str(Path(script).parent)
    loop = TunedLoop(**json.loads(os.environ[TUNE]))
    with loop.examination:
        runpy.run_path(script, run_name="__main__")


@dataclass
class Tuning:
    """What is asked for, and the deadline.

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
        plan = make_plan(
            watch.module,
            watch.batch,
            self.memory,
            keep=self.keep,
            # Only a run in float32 is offered another precision: whoever has set one has had a reason.
            precision=None if precision == "32-true" else precision,
            device=watch.settings["accelerator"],
            steps=steps,
            seconds=max(1.0, self.began + (_SHARES["doctor"] + _SHARES["plan"]) * self.seconds - time.monotonic()),
            loader=loader,
            tell=self.progress.say,
            **{name: value for name, value in watch.settings.items() if name != "accelerator"},
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
            if verified is None or verified.ok:
                return choice, verified, refused
            results.append((choice, verified))
            refused.append(f"Not advised is {choice}: {describe_verdict(verified).rstrip('.')}.")
        return *results[0], []

    def measure_in_turn(self, watch: Stopwatch, rivals: list[Choice]) -> dict[Choice, list[float]]:
        """Measure a step of each of the choices in turn, until it is decided which one is the fastest, or time is up.

        Whatever slows the machine for longer than a turn cancels in the ratios of its times. A choice that fails is
        left out, as the plain step is that does not fit.

        Raises:
            Exception: all of them fail; the error is that of the last one.
        """
        times_ms: dict[Choice, list[float]] = {rival: [] for rival in rivals}
        for turn in range(_MOST_TURNS):
            for rival in list(times_ms):
                self.progress.say(f"turn {turn + 1}: {rival}")
                try:
                    times_ms[rival].append(watch.time(rival).ms)
                except Exception as error:
                    self.progress.say(f"{rival} fails: {first_line(error)}")
                    del times_ms[rival]
                    if not times_ms:
                        raise
            enough = turn + 1 >= _FEWEST_TURNS
            is_late = time.monotonic() > self.began + self.seconds
            if enough and (is_decided(list(times_ms.values())) or is_late):
                break
        return times_ms


class WatchCopy(Doctor):
    """A doctor of a copy of the run, which ends it with the diagnosis; of long steps it watches fewer."""

    watches_copies: ClassVar[bool] = True

    def __init__(self, seconds: float) -> None:
        super().__init__(_WATCHED, _WARMUP, show=False)
        self.seconds = seconds
        self._began = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._watch is not None and self._watch.done == _WARMUP:
            a_step = (time.monotonic() - self._began) / _WARMUP
            self._watch.steps = max(6, min(_WATCHED, int(self.seconds / a_step)))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_diagnosis(self, diagnosis: Diagnosis) -> None:
        raise EnoughError


def watch_copy(trainer: L.Trainer, run: RunCopy, seconds: float) -> Diagnosis | None:
    """Run a copy of the run on its own loader with a doctor; returns the diagnosis, None if it was too short."""
    doctor = WatchCopy(seconds)
    silent = copy.copy(run)
    silent.settings = {**run.settings, "enable_checkpointing": False}
    silent.fit(training_loader(trainer), [], doctor, one_device_again(trainer))
    return doctor.diagnosis


class TuneAndEnd(RehearseAndEnd):
    """Tunes the run on copies of it, after which the process ends.

    Args:
        memory, keep, seconds: as in the environment.
    """

    def __init__(self, memory: str, keep: str, seconds: float) -> None:
        super().__init__()
        self.orders = memory, keep, seconds

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: watch, plan and verify, and end the process."""
        ranks = trainer.world_size
        if not trainer.is_global_zero:
            end_process(0)
        for loop in TunedLoop.running:
            loop.examination.cancel()
        if dist.is_initialized():
            dist.destroy_process_group()  # the others have ended, and nothing may wait for them
        try:
            with Rehearsing(), leaving_no_trace(trainer, pl_module):
                advice = self._advise(trainer, pl_module, Tuning.ordered(*self.orders))
        except (RehearsalError, ValueError, TypeError) as error:
            end_script(True, {"ok": False, "error": str(error)})
        except Exception as error:
            end_script(True, {"ok": False, "error": f"the step fails on a copy of the model: {describe_error(error)}"})
        if ranks > 1:
            advice.notes.append(f"Measured on one of {ranks} ranks alone, without the exchange of gradients.")
        end_script(True, {"ok": True, "advice": asdict(advice)})

    def _advise(self, trainer: L.Trainer, pl_module: L.LightningModule, tuning: Tuning) -> Advice:
        run, loader = self._run, training_loader(trainer)
        assert run is not None
        tuning.progress.say("reading batches")
        run.share_equal_weights(pl_module)
        sample, validation = read_batches(trainer, 2, seconds=0.0)
        seen = "it ended too early"
        diagnosis: Diagnosis | None = None
        tuning.progress.say("watching some steps of a copy of the run")
        try:
            diagnosis = watch_copy(trainer, run, _SHARES["doctor"] * tuning.seconds)
        except Exception as error:
            seen = describe_error(error)
        clipping = {name: value for name, value in run.settings.items() if name.startswith("gradient_clip")}
        device = trainer.strategy.root_device.type
        with run.module_with_transfer_hooks() as module, quietly():
            advice = tuning.advise(
                Stopwatch(module, sample.first[0], {"accelerator": device, **clipping}),
                str(trainer.precision),
                count_batches(trainer, loader),
                loader,
                lambda techniques: verify_run(trainer, run, sample.first, validation, techniques),
            )
        advice.replaced.extend(type(technique).__name__ for technique in run.techniques)
        if diagnosis is None:
            advice.notes.append(f"What the time of a step goes to was not seen: {seen}.")
            return advice
        return with_diagnosis(advice, diagnosis)


_RIVALS, _FEWEST_TURNS, _MOST_TURNS = 3, 3, 8


def list_fitting(plan: Plan) -> list[Choice]:
    """Return the choices of a plan that fit: the planned one, it without compiled blocks, and the next best ones.

    The gain of compiled blocks was perhaps assumed, and they are slower where they draw dropout on a CPU. If the plan
    has none, their time to compile did not pay.
    """
    chosen = plan.chosen.choice
    found = [chosen, replace(chosen, compile=""), replace(chosen, layout="")]
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
    """Return the choices that fit, the fastest and simplest first; the plain step only if it is alone."""
    plain = plan.plain.choice
    allowed = [choice for choice in times_ms if choice in fitting and choice != plain] or list(times_ms)
    ranked = [Tried(choice, 0.0, 0.0, tuple(times_ms[choice])) for choice in allowed]
    ranked.sort(key=lambda tried: tried.ms)
    return [tried.choice for tried in simplest_of_equals_first(ranked)]


def describe_verdict(verified: Verification) -> str:
    """Return why a verification failed, or how near the training is."""
    verdicts = [row.verdict for row in verified.rows[:1]]
    return ". ".join([*(problem.rstrip(".") for problem in verified.problems), *verdicts])


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
        ratio, before_ms = compare_times(times_ms[choice], times_ms[plain]), min(times_ms[plain])
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
        is_same=verified is None or verified.ok,
        replaced=[],
        yaml=replace(plan, chosen=replace(plan.chosen, choice=choice)).yaml(),
        points=points,
    )


# What the plan has measured; "padding" is in its notes too, but where none can be cut off they say only why.
_PLANNED = ("bf16", "tf32", "channels_last", "logits", "attention")


def with_diagnosis(advice: Advice, diagnosis: Diagnosis) -> Advice:
    """Return the advice with the doctor's shares and findings."""
    findings: list[tuple[float, str, str]] = []
    for finding in diagnosis.findings:
        share = finding.share_of(diagnosis.step_ms)
        if finding.kind not in _PLANNED and (finding.cost is None or share >= 0.03):
            findings.append((share, finding.what, finding.cure))
    return replace(advice, costs=diagnosis.list_costs(), findings=findings)


_UNMARKED = (
    "Nothing marks the step of this loop, so no technique was tried on it. Write "
    "loss = ft.accumulate_gradients(step, batch, n=1) in place of the forward and loss.backward(), where step is a "
    "function that maps a batch to its loss, and run this command again."
)


class TunedLoop:
    """A loop without a Trainer, whose step is tuned if it calls ``accumulate_gradients``.

    Args:
        memory, keep, seconds: as in the environment.
    """

    running: ClassVar[list["TunedLoop"]] = []

    def __init__(self, memory: str, keep: str, seconds: float) -> None:
        self.orders = memory, keep, seconds
        self.examination: Examination = examine(8, _WARMUP, report=self._report)
        self._marked: tuple[Callable[[Any], Any], Any] | None = None
        self._mark()
        TunedLoop.running.append(self)

    def _mark(self) -> None:
        file = importlib.import_module("lightning_fasttrain.micro_batching.accumulate_gradients")
        original = file.accumulate_gradients

        @functools.wraps(original)
        def accumulate_gradients(step: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            self._marked = step, batch
            return original(step, batch, *arguments, **named)

        for module in list(sys.modules.values()):  # packages keep the names that were asked for
            if vars(module).get("accumulate_gradients") is original:
                patch(module, "accumulate_gradients", accumulate_gradients)

    def _report(self, diagnosis: Diagnosis) -> None:
        if self._marked is None or len(self.examination.watch.models) != 1:
            nothing = Advice(0.0, 0.0, (1.0, 1.0, 1.0), 0, 0, [], None, [], [_UNMARKED], "", True, [], "", lines=[])
            end_script(True, {"ok": True, "advice": asdict(with_diagnosis(nothing, diagnosis))})
        try:
            with Rehearsing(), quietly():
                advice = self._advise(*self._marked)
        except Exception as error:
            end_script(True, {"ok": False, "error": f"the marked step fails on a copy: {describe_error(error)}"})
        end_script(True, {"ok": True, "advice": asdict(with_diagnosis(advice, diagnosis))})

    def _advise(self, step: Callable[[Any], Any], batch: Any) -> Advice:
        watch = self.examination.watch
        live = watch.models[0]
        live = getattr(live, "module", live)  # what Fabric has wrapped
        optimizer = plain_optimizer(next(iter(watch.updates.values())).optimizer)

        def loss(net: nn.Module, of: Any) -> Any:
            undo = patch(live, "forward", net.__call__)
            try:
                return step(of)
            finally:
                undo()

        module = as_lightning_module(live, loss, functools.partial(make_alike, optimizer))
        settings = {"accelerator": watch.device.type}
        tuning = Tuning.ordered(*self.orders)
        advice = tuning.advise(
            Stopwatch(module, batch, settings),
            "32-true",
            10_000,
            None,
            lambda techniques: verify(module, batch, techniques, **settings),
        )
        return replace(advice, lines=describe_loop(advice))


def make_alike(optimizer: Optimizer, parameters: Any) -> Optimizer:
    """Return a new optimizer of the kind and with the settings of another one, for other parameters."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return type(optimizer)([{**group, "params": list(parameters)}], lr=optimizer.defaults["lr"])


def describe_loop(advice: Advice) -> list[str]:
    """Return what to write in a loop of its own."""
    from lightning_fasttrain.planner.candidates import class_named

    lines = ["import lightning_fasttrain as ft", ""] if advice.techniques else []
    if advice.precision:
        lines.append(f"Fabric(precision={advice.precision!r}), or torch.autocast around the forward")
    for made in advice.techniques:
        kind = class_named(made.partition("(")[0].rpartition(".")[2])
        assert issubclass(kind, Technique)
        if kind.surgery is not None:
            lines.append(f"ft.apply(model, [{made}])  # before the optimizer is made")
        else:
            lines.append(f"{made}: ft.{kind.in_a_loop}")
    return lines
