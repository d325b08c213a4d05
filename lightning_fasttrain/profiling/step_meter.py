"""Time of a training step by phase, and its throughput."""

import socket
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import inf
from operator import itemgetter
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import nn

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import NonNegativeInt, PositiveFloat, check_arguments, one_of
from lightning_fasttrain.core.device import DeviceTimer, dtype_of, peak_flops
from lightning_fasttrain.core.distributed import gather_values, is_sharded
from lightning_fasttrain.core.host.lightning import is_time_to_log, log_to_all
from lightning_fasttrain.core.messages import format_ms, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Technique

PHASES = ("data_wait", "transfer", "forward", "backward", "optimizer", "pause")
# The latest steps only, since a long run must not keep the times of every step.
_KEPT_STEPS = 1000
_Mark = tuple[str, Any]  # where an interval of a phase ends on the device
_Step = tuple[dict[str, float], list[_Mark], int, int]  # seconds on the host, marks (CUDA only), samples, tokens


@check_arguments
class StepTimer:
    """Milliseconds per step, split into phases, and samples and tokens per second; for Fabric and bare loops.

    A step lasts from the end of the previous one; the first starts when the timer is created. Phases may nest: time
    counts towards the innermost. Time outside of phases is "other", and time in ``phase("pause")`` is not counted. On
    CUDA the times are measured on the device, by events in the stream, so that nothing waits within a step; only the
    data wait is measured on the host. It can hide behind queued work, and the phases then exceed the step. On any other
    device all times are measured on the host.

    Args:
        device: device of the model.
        warmup: number of initial steps that are not measured.
        phases: names of the phases, in the order of a step; "pause" is one of them.

    Example:
        >>> import torch
        >>> timer = StepTimer("cpu", warmup=0)
        >>> for batch in torch.zeros(3, 8, 2):
        ...     with timer.phase("forward"):
        ...         loss = batch.sum()
        ...     timer.end_step(samples=len(batch))
        >>> list(timer.summary())
        ['step_ms', 'data_wait_ms', 'transfer_ms', 'forward_ms', 'backward_ms', 'optimizer_ms', 'other_ms',
         'samples_per_s']

    Source:
        Ours. The separation of a plain timer and a callback that holds it follows Lightning's ``Throughput``.
    """

    def __init__(self, device: torch.device | str, warmup: NonNegativeInt = 5, phases: Sequence[str] = PHASES) -> None:
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._timer = DeviceTimer(self._device)
        self._to_skip = warmup
        self._phases = {name: TimedPhase(self, name) for name in phases}
        self._nothing_yet = dict.fromkeys((*phases, "other"), 0.0)
        self._outer: list[str] = []
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._current = "other"
        self._since = perf_counter()
        self._host_s = self._nothing_yet.copy()
        self._marks: list[_Mark] = []
        self._switch("other")

    def phase(self, name: str) -> "TimedPhase":
        """Return a context manager around one phase of the step.

        Raises:
            ValueError: the name is not one of the timer's phases.
        """
        return self._phases[one_of("phase", name, tuple(self._phases))]

    @property
    def current(self) -> str:
        """Name of the innermost phase at this moment; "other" outside of phases."""
        return self._current

    def end_step(self, samples: int = 0, tokens: int = 0) -> None:
        """Mark the end of a step with its samples and tokens; the next one begins."""
        self._switch(self._current)
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._steps.append((self._host_s, self._marks, samples, tokens))
        self._host_s = self._nothing_yet.copy()
        # The end of this step is the beginning of the next one.
        self._marks = self._marks[-1:]

    def summary(self, last: int = _KEPT_STEPS, wait: bool = True) -> dict[str, float]:
        """Return medians over the latest steps.

        Args:
            last: maximum number of steps; a thousand are kept.
            wait: wait for a CUDA device to finish. Otherwise steps that it is still running are left out.

        Returns:
            ``step_ms``, the milliseconds of each phase, ``other_ms`` for the rest, and ``samples_per_s`` and
            ``tokens_per_s`` if these were counted. Empty if no step was measured.
        """
        steps = self._read_steps(last, wait)
        if not steps:
            return {}
        middle: dict[str, float] = {}
        for name in steps[0]:
            middle[name] = median(step[name] for step in steps)
        # Each phase has its own median, so they need not add up to the median step.
        parts = {f"{name}_ms": middle[name] * 1e3 for name in self._phases if name != "pause"}
        step_ms = middle["step"] * 1e3
        counted = {f"{name}_per_s": middle[name] for name in ("samples", "tokens") if middle[name]}
        return {"step_ms": step_ms, **parts, "other_ms": max(0.0, step_ms - sum(parts.values())), **counted}

    def step_times(self) -> list[dict[str, float]]:
        """Return the milliseconds of each measured step by phase, with "other" and "step", after waiting for CUDA."""
        times = []
        for step in self._read_steps(_KEPT_STEPS, wait=True):
            times.append({name: 1e3 * step[name] for name in (*self._nothing_yet, "step")})
        return times

    def _read_steps(self, last: int, wait: bool) -> list[dict[str, float]]:
        if wait and self._on_cuda:
            torch.cuda.synchronize(self._device)
        recent = list(self._steps)[-last:]
        # elapsed_time raises for an event that has not passed.
        return [_read(*step) for step in recent if _has_passed(step[1])]

    def _switch(self, name: str) -> None:
        """End the interval of the current phase, and begin one of ``name``."""
        now = perf_counter()
        self._host_s[self._current] += now - self._since
        self._since = now
        if self._on_cuda:
            self._marks.append((self._current, self._timer.now()))
        self._current = name


class TimedPhase:
    """A reusable phase, because a step enters several of them."""

    def __init__(self, timer: StepTimer, name: str) -> None:
        self.timer, self.name = timer, name

    def __enter__(self) -> None:
        timer = self.timer
        timer._outer.append(timer._current)
        timer._switch(self.name)

    def __exit__(self, *_: object) -> None:
        timer = self.timer
        timer._switch(timer._outer.pop())


def _has_passed(marks: list[_Mark]) -> bool:
    return all(event.query() for _, event in marks)


def _read(host_s: dict[str, float], marks: list[_Mark], samples: int, tokens: int) -> dict[str, float]:
    spent_s = host_s
    if marks:
        spent_s = dict.fromkeys(host_s, 0.0)
        for (_, start), (phase, end) in pairwise(marks):
            # A mark ends the interval before it, so two neighbors delimit one interval, with the phase of its end.
            spent_s[phase] += start.elapsed_time(end) / 1e3
    step_s = sum(spent_s.values()) - spent_s["pause"]
    per = step_s or inf  # a step of 0 s has no throughput
    # While the host waits for data the device is idle or busy with older work, so its time is not used.
    waited_s = host_s["data_wait"]
    return {**spent_s, "samples": samples / per, "tokens": tokens / per, "data_wait": waited_s, "step": step_s}


# In later phases ranks wait for each other.
UNTIL_BACKWARD = ("data_wait", "transfer", "forward")


@check_arguments
def compare_ranks(
    summary: Mapping[str, float],
    device: torch.device | str,
    phases: Sequence[str] = UNTIL_BACKWARD,
    at_least: PositiveFloat = 1.2,
) -> str:
    """Find the rank that the others wait for. All ranks must call it; a few hundred bytes are gathered.

    In a step that ends with a common all-reduce all ranks take the same time, because the fast ones wait. So the time
    before the all-reduce is compared.

    Args:
        summary: summary of this rank's :class:`~lightning_fasttrain.profiling.StepTimer`.
        device: this rank's device.
        phases: phases in which no rank waits for another. With sharded parameters, leave out the forward, in which
            ranks do wait.
        at_least: minimum ratio to the median of the others; in addition, 10% of the step must be lost.

    Returns:
        A sentence, the same on all ranks; "" if no rank is slow, or some have not measured anything yet.

    Example:
        >>> compare_ranks({"step_ms": 10.0, "data_wait_ms": 1.0}, "cpu")
        ''

    Source:
        Ours.
    """
    mine = {"host": socket.gethostname(), **{name: summary.get(f"{name}_ms", 0.0) for name in (*phases, "step")}}
    everyone = gather_values(mine, torch.device(device))
    # A rank without measurements has a step of 0 ms.
    if len(everyone) < 2 or not all(row["step"] for row in everyone):
        return ""
    return describe_slowest(everyone, phases, at_least)


def phases_to_compare(model: nn.Module) -> Sequence[str]:
    """Return the phases in which no rank waits for another, which exclude the forward if parameters are sharded."""
    if is_sharded(model):
        return UNTIL_BACKWARD[:2]
    return UNTIL_BACKWARD


def describe_slowest(ranks: Sequence[Mapping[str, float | str]], phases: Sequence[str], at_least: float) -> str:
    r"""Return the sentence of :func:`compare_ranks`.

    Args:
        ranks: milliseconds of each rank by phase and for its ``step``, and its ``host``.

    Example:
        >>> fast, slow = {"host": "a", "data_wait": 1.0, "step": 10.0}, {"host": "b", "data_wait": 5.0, "step": 10.0}
        >>> print(describe_slowest([fast, slow, fast], ["data_wait"], 1.2).replace("; ", ";\n"))
        rank 1 (b) takes 5 ms until its backward where the others take 1 (5 times as long, most of it data_wait);
        they wait for it 4 ms of a step of 10 ms
    """
    own_ms: list[float] = []
    for rank in ranks:
        own_ms.append(sum(float(rank[phase]) for phase in phases))
    slowest = own_ms.index(max(own_ms))
    others = [rank for number, rank in enumerate(ranks) if number != slowest]
    usual_ms = median(own_ms[:slowest] + own_ms[slowest + 1 :])
    lost_ms, step_ms = own_ms[slowest] - usual_ms, float(ranks[slowest]["step"])
    if own_ms[slowest] < at_least * usual_ms or lost_ms < 0.1 * step_ms:
        return ""

    def lost_in(phase: str) -> float:
        return float(ranks[slowest][phase]) - median(float(rank[phase]) for rank in others)

    # The others may have taken 0 ms.
    times = f"{own_ms[slowest] / usual_ms:.3g} times as long, " if usual_ms else ""
    return (
        f"rank {slowest} ({ranks[slowest]['host']}) takes {own_ms[slowest]:.3g} ms until its backward where the others "
        f"take {usual_ms:.3g} ({times}most of it {max(phases, key=lost_in)}); they wait for it {lost_ms:.3g} ms of a "
        f"step of {step_ms:.3g} ms"
    )


class StepMeter(Technique):
    """Measures the time of each phase of a training step; see :class:`StepTimer`.

    Acts through the Trainer's profiler, which Lightning calls around each phase: for the length of the fit the user's
    profiler is wrapped by one that forwards everything. A step is one optimizer step with all the batches it
    accumulated, and lasts until the next batch is requested, without validation. Every ``log_every_n_steps`` steps the
    medians since then are logged as ``step_meter/step_ms`` and so on, and one line is written to the package's log at
    the end. Under manual optimization Lightning does not mark the backward, whose time is then in ``forward_ms``.

    Args:
        warmup: number of initial steps that are not measured.
        flops: FLOPs of a complete step on one device, if all steps are the same, as counted by
            :func:`~lightning_fasttrain.memory.count_flops` for the batches of a step. With it the summary has
            ``mfu``, the fraction of :func:`~lightning_fasttrain.core.device` that is used.
        compare_ranks_every: optimizer steps between two comparisons of the ranks, which warn of one that the others
            wait for; see :func:`~lightning_fasttrain.profiling.compare_ranks`. 0 for none; the ranks wait for each one.

    Raises:
        TypeError, ValueError: a number of steps or of FLOPs is invalid.

    Example:
        >>> meter = StepMeter(warmup=10)
        >>> meter.summary()  # after `Trainer(callbacks=[meter]).fit(model)`: {'step_ms': ...}
        {}

    Source:
        Ours; Lightning's own ``SimpleProfiler`` adds up host time by action, without subtracting nested actions.
    """

    bitwise: ClassVar[bool] = True
    ways_out: ClassVar[Mapping[str, str]] = {"flops": "Use ft.memory.count_flops(module, batch)"}
    effect: ClassVar[str] = "ms per step by phase, samples/s, tokens/s"
    when: ClassVar[str] = "you want to know where the time goes"
    in_a_loop: ClassVar[str] = "profiling.StepTimer(device)"
    predicted: ClassVar[bool] = True

    def __init__(
        self, warmup: NonNegativeInt = 5, flops: PositiveFloat | None = None, compare_ranks_every: NonNegativeInt = 0
    ) -> None:
        self.warmup = warmup
        self.compare_ranks_every = compare_ranks_every
        self.flops = flops
        self._peak_flops: float | None = None
        self._profiler: StepProfiler | None = None
        self._result: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """Return the medians so far, or those of the last fit; see :meth:`StepTimer.summary`."""
        found = self._result if self._profiler is None else self._profiler.timer.summary(wait=False)
        if self._peak_flops is None or self.flops is None or "step_ms" not in found:
            return found
        # FLOP/s of the step over those of the device.
        return {**found, "mfu": self.flops / (found["step_ms"] / 1e3) / self._peak_flops}

    def measurements(self) -> dict[str, float]:
        found = self.summary()
        return {name: found[name] for name in ("step_ms", "tokens_per_s", "mfu") if name in found}

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self._profiler = StepProfiler(trainer, StepTimer(trainer.strategy.root_device, self.warmup))
        # Lightning reads `trainer.profiler` at each call, so an instance attribute is enough.
        restore = patch(trainer, "profiler", self._profiler)

        def undo() -> None:
            restore()
            self._result = self.summary()  # while the profiler still exists
            self._profiler = None

        return undo

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is done and known, and Lightning logs its own metrics next."""
        profiler = self._profiler
        if profiler is None:
            return
        samples, tokens = count_batch(batch)
        profiler.samples += samples
        profiler.tokens += tokens
        if profiler.stepped and self.compare_ranks_every and trainer.global_step % self.compare_ranks_every == 0:
            self._compare_ranks(profiler.timer, pl_module)
        if profiler.stepped and trainer.loggers and is_time_to_log(trainer):
            summary = profiler.timer.summary(last=int(trainer.log_every_n_steps), wait=False)
            metrics = {f"step_meter/{name}": value for name, value in summary.items()}
            if metrics:
                log_to_all(trainer, metrics)

    def _compare_ranks(self, timer: StepTimer, module: L.LightningModule) -> None:
        since = timer.summary(last=self.compare_ranks_every, wait=False)
        slow = compare_ranks(since, module.device, phases_to_compare(module))
        if slow:
            warn(f"StepMeter: {slow}.")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook, like ``on_train_epoch_end``: nothing is timed until the next training batch is requested."""
        if self._profiler is not None:
            self._profiler.leave_loop()

    on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last in which the device is still fully available."""
        if self._profiler is not None:
            self._profiler.timer.summary()  # waits for the device
            if self.flops is not None:
                self._peak_flops = peak_flops(trainer.strategy.root_device, dtype_of(trainer.precision))
            nothing = f"nothing was measured: the fit ended within the first {self.warmup} steps"
            say("StepMeter: %s", _describe(self.summary()) or nothing)


_WORDS = {"data_wait": "waiting for data", "transfer": "transfer to the device"}


def _describe(summary: Mapping[str, float]) -> str:
    """Return a summary as a line: the phases, the longest first, as far as they take a hundredth of the step."""
    if not summary:
        return ""
    step_ms = summary["step_ms"]
    phases = {name: summary[f"{name}_ms"] for name in (*PHASES, "other") if f"{name}_ms" in summary}
    longest = sorted(phases.items(), key=itemgetter(1), reverse=True)
    parts = [f"{_WORDS.get(name, name)} {format_ms(ms)}" for name, ms in longest if ms >= step_ms / 100]
    rates = [f"{summary[f'{of}_per_s']:,.0f} {of}/s" for of in ("samples", "tokens") if f"{of}_per_s" in summary]
    return "; ".join([f"{format_ms(step_ms)} ms/step: {', '.join(parts)}", *rates])


class StepProfiler(Profiler):
    """Forwards everything to the user's profiler, and reports the beginning and end of actions to the timer."""

    def __init__(self, trainer: L.Trainer, timer: StepTimer) -> None:
        self.inner, self.timer, self.trainer = trainer.profiler, timer, trainer
        self.samples = self.tokens = 0
        self.in_loop = self.stepped = False
        # Profiler defines these four, so __getattr__ is never called for them.
        self.setup, self.teardown = self.inner.setup, self.inner.teardown
        self.summary, self.describe = self.inner.summary, self.inner.describe
        # Nothing is timed until the first batch is requested.
        timer.phase("pause").__enter__()
        strategy, module = type(trainer.strategy).__name__, type(trainer.lightning_module).__name__
        self.actions: dict[str, PhaseAction] = {
            # Lightning's action names contain class names, so they are built for this run.
            f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next": PhaseAction(self, "data_wait"),
            f"[Strategy]{strategy}.batch_to_device": PhaseAction(self, "transfer"),
            f"[Strategy]{strategy}.training_step": PhaseAction(self, "forward"),
            f"[Strategy]{strategy}.backward": PhaseAction(self, "backward"),
            f"[LightningModule]{module}.optimizer_step": PhaseAction(self, "optimizer"),
            "optimizer_step": PhaseAction(self, "optimizer"),  # its name under manual optimization
        }
        if type(self.inner) is PassThroughProfiler:
            # Lightning's default does nothing, but creates a generator for each hook of each callback. A dictionary
            # lookup saves about as much as the timing costs.
            self.profile = defaultdict(nullcontext, self.actions).__getitem__

    def enter_loop(self) -> None:
        """End the previous step, unless it is still accumulating, because a batch is requested."""
        if not self.in_loop:
            self.in_loop = True
            self.timer.phase("pause").__exit__()
        elif self.stepped:
            self._end_step()

    def leave_loop(self) -> None:
        """Pause the timer: what follows does not belong to training."""
        if self.in_loop:
            if self.stepped:
                self._end_step()
            self.in_loop = False
            self.timer.phase("pause").__enter__()

    def _end_step(self) -> None:
        self.timer.end_step(self.samples, self.tokens)
        self.samples = self.tokens = 0
        self.stepped = False

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        # Inside the user's profiler on both sides, so that its own work is not timed.
        if action_name in self.actions:
            self.actions[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        if action_name in self.actions:
            self.actions[action_name].__exit__()
        self.inner.stop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Generator[str]:
        with self.inner.profile(action_name), self.actions.get(action_name, nullcontext()):
            yield action_name

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set in a copy under construction
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        """Do nothing: the user's profiler is torn down by its owner."""


class PhaseAction(TimedPhase):
    """An action of the Trainer as a phase of the timer. During validation actions are not timed."""

    def __init__(self, profiler: StepProfiler, name: str) -> None:
        super().__init__(profiler.timer, name)
        self.profiler = profiler
        self.is_fetch, self.is_transfer, self.is_update = name == "data_wait", name == "transfer", name == "optimizer"

    def __enter__(self) -> None:
        profiler = self.profiler
        # A prefetched batch is not requested again: its transfer is then the first sign of a new step.
        is_over = profiler.stepped or (not profiler.in_loop and profiler.trainer.training)
        if self.is_fetch or (self.is_transfer and is_over):
            profiler.enter_loop()
        if profiler.in_loop:
            super().__enter__()

    def __exit__(self, *_: object) -> None:
        if self.timer._current == self.name:  # it was entered within the loop
            self.profiler.stepped |= self.is_update
            super().__exit__()
