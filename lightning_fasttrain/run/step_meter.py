"""Where the time of a training step goes, and how much data passes through it."""

from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_fasttrain._checks import one_of, positive_int
from lightning_fasttrain._counts import count_batch
from lightning_fasttrain._host import is_time_to_log, step_for_loggers
from lightning_fasttrain._messages import explain, say
from lightning_fasttrain._surgery import Undo, patch
from lightning_fasttrain._technique import Technique
from lightning_fasttrain.run.peak_flops import dtype_of, peak_flops

PHASES = ("data_wait", "transfer", "forward", "backward", "optimizer", "pause")
_KEPT_STEPS = 1000  # the latest: a long run must not keep the times of every step
_NOTHING_YET: dict[str, float] = dict.fromkeys((*PHASES, "other"), 0.0)
_Mark = tuple[str, torch.cuda.Event]  # where a stretch of a phase ends on the device
_Step = tuple[dict[str, float], list[_Mark], int, int]  # seconds on the host, marks (CUDA only), samples, tokens


class StepTimer:
    """Milliseconds per step, split into phases, and samples and tokens per second; for Fabric and bare loops.

    A step runs from the end of the one before it, the first one from where the timer is made. Phases may nest: time
    belongs to the innermost. What is in no phase is "other", and what is in ``phase("pause")`` is left out. On CUDA
    the times are the device's own, from events that the stream passes on its way, so that nothing waits within a
    step; only the data wait is the host's, which can hide behind queued work, and the parts then exceed the step.
    On any other device they are the host's.

    Args:
        device: where the model is.
        warmup: steps at the start that are left out.

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
        Ours. That the timer knows no host, and the callback holds it, follows Lightning's ``Throughput``.
    """

    def __init__(self, device: torch.device | str, warmup: int = 5) -> None:
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._to_skip = positive_int("warmup", warmup) if warmup != 0 else 0
        self._phases = {name: _Phase(self, name) for name in PHASES}
        self._outer: list[str] = []
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._current = "other"
        self._since = perf_counter()
        self._host_s = _NOTHING_YET.copy()
        self._marks: list[_Mark] = []
        self._switch("other")

    def phase(self, name: str) -> "_Phase":
        """Context manager around one phase of the step.

        Raises:
            ValueError: the name is none of :data:`PHASES`.
        """
        return self._phases[one_of("phase", name, PHASES)]

    def end_step(self, samples: int = 0, tokens: int = 0) -> None:
        """Say that a step ends here, and how much was in it; the next one begins."""
        self._switch(self._current)
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._steps.append((self._host_s, self._marks, samples, tokens))
        self._host_s = _NOTHING_YET.copy()
        self._marks = self._marks[-1:]

    def summary(self, last: int = _KEPT_STEPS, wait: bool = True) -> dict[str, float]:
        """Medians over the latest steps.

        Args:
            last: how many steps, at most; a thousand are kept.
            wait: let a CUDA device finish first. Otherwise the steps it is still busy with are left out.

        Returns:
            ``step_ms``, the milliseconds of each phase, ``other_ms`` for what they leave of the step, and
            ``samples_per_s`` and ``tokens_per_s`` where these were counted. Empty if no step was measured.
        """
        if wait and self._on_cuda:
            torch.cuda.synchronize(self._device)
        recent = list(self._steps)[-last:]
        steps = [_read(*step) for step in recent if _has_passed(step[1])]
        if not steps:
            return {}
        middle: dict[str, float] = {}
        for name in steps[0]:
            middle[name] = median(step[name] for step in steps)
        parts = {f"{name}_ms": middle[name] * 1e3 for name in PHASES if name != "pause"}
        step_ms = middle["step"] * 1e3
        counted = {f"{name}_per_s": middle[name] for name in ("samples", "tokens") if middle[name]}
        return {"step_ms": step_ms, **parts, "other_ms": max(0.0, step_ms - sum(parts.values())), **counted}

    def _switch(self, name: str) -> None:
        """A stretch of the current phase ends here, and one of ``name`` begins."""
        now = perf_counter()
        self._host_s[self._current] += now - self._since
        self._since = now
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((self._current, event))
        self._current = name


class _Phase:
    """Made once for each phase, because a step enters several of them."""

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
        spent_s = _NOTHING_YET.copy()
        for (_, start), (phase, end) in pairwise(marks):
            spent_s[phase] += start.elapsed_time(end) / 1e3
    step_s = sum(spent_s.values()) - spent_s["pause"]
    per = step_s or inf  # in no time there is no rate
    waited_s = host_s["data_wait"]
    return {**spent_s, "samples": samples / per, "tokens": tokens / per, "data_wait": waited_s, "step": step_s}


class StepMeter(Technique):
    """Shows where the time of a training step goes; see :class:`StepTimer`.

    Acts through the Trainer's profiler, which Lightning calls around each phase: for the length of the fit a thin
    one stands before the user's, forwards everything and is taken out again. A step is one optimizer step with all
    the batches it accumulated, and runs until the next batch is asked for; validation is left out. Every
    ``log_every_n_steps`` steps the medians since then go to the loggers as ``step_meter/step_ms`` and so on, and
    one line is written to the package's log at the end. Under manual optimization Lightning does not mark the
    backward, and its time is in ``forward_ms``.

    Args:
        warmup: steps at the start that are left out.
        flops: floating-point operations of a whole step on one device, if steps are alike: those that
            :func:`~lightning_fasttrain.plan.count_flops` counts for its batches. With them the summary has ``mfu``,
            the share of :func:`~lightning_fasttrain.run.peak_flops` that they make use of.

    Raises:
        TypeError, ValueError: no number of steps; no number of operations.

    Example:
        >>> meter = StepMeter(warmup=10)
        >>> meter.summary()  # after `Trainer(callbacks=[meter]).fit(model)`: {'step_ms': ...}
        {}

    Source:
        Ours; Lightning's own ``SimpleProfiler`` adds up host time by action, without subtracting what is nested.
    """

    effect: ClassVar[str] = "ms per step by phase, samples/s, tokens/s"
    when: ClassVar[str] = "you want to know where the time goes"
    in_a_loop: ClassVar[str] = "run.StepTimer(device)"
    predicted: ClassVar[bool] = True

    def __init__(self, warmup: int = 5, flops: float | None = None) -> None:
        self.warmup = positive_int("warmup", warmup) if warmup != 0 else 0
        if flops is not None and not flops > 0:
            raise ValueError(
                explain(f"{flops=}", "a step computes something", "Use ft.plan.count_flops(module, batch)")
            )
        self.flops = flops
        self._peak_flops: float | None = None
        self._profiler: _StepProfiler | None = None
        self._result: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """The medians so far, or those of the last fit; see :meth:`StepTimer.summary`."""
        found = self._result if self._profiler is None else self._profiler.timer.summary(wait=False)
        if self._peak_flops is None or self.flops is None or "step_ms" not in found:
            return found
        return {**found, "mfu": self.flops / (found["step_ms"] / 1e3) / self._peak_flops}

    def measured(self) -> dict[str, float]:
        found = self.summary()
        return {name: found[name] for name in ("step_ms", "tokens_per_s", "mfu") if name in found}

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self._profiler = _StepProfiler(trainer, StepTimer(trainer.strategy.root_device, self.warmup))
        restore = patch(trainer, "profiler", self._profiler)

        def undo() -> None:
            restore()
            self._result = self.summary()
            self._profiler = None

        return undo

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the batch is over and known, and Lightning logs its own metrics next."""
        profiler = self._profiler
        if profiler is None:
            return
        samples, tokens = count_batch(batch)
        profiler.samples += samples
        profiler.tokens += tokens
        if profiler.stepped and trainer.loggers and is_time_to_log(trainer):
            summary = profiler.timer.summary(last=int(trainer.log_every_n_steps), wait=False)
            metrics = {f"step_meter/{name}": value for name, value in summary.items()}
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=step_for_loggers(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook, like ``on_train_epoch_end``: until the next training batch is asked for, nothing is timed."""
        if self._profiler is not None:
            self._profiler.leave_loop()

    on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last in which the device still has all it needs."""
        if self._profiler is not None:
            self._profiler.timer.summary()  # once the device has done what it was given
            if self.flops is not None:
                self._peak_flops = peak_flops(trainer.strategy.root_device, dtype_of(trainer.precision))
            found = self.summary()
            values = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            say("StepMeter: %s", values or f"nothing measured, the fit ended within the first {self.warmup} steps")


class _StepProfiler(Profiler):
    """Forwards everything to the user's profiler, and tells the timer what begins and ends."""

    def __init__(self, trainer: L.Trainer, timer: StepTimer) -> None:
        self.inner, self.timer, self.trainer = trainer.profiler, timer, trainer
        self.samples = self.tokens = 0
        self.in_loop = self.stepped = False
        self.setup, self.teardown = self.inner.setup, self.inner.teardown
        self.summary, self.describe = self.inner.summary, self.inner.describe
        timer.phase("pause").__enter__()
        strategy, module = type(trainer.strategy).__name__, type(trainer.lightning_module).__name__
        self.actions: dict[str, _Action] = {
            f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next": _Action(self, "data_wait"),
            f"[Strategy]{strategy}.batch_to_device": _Action(self, "transfer"),
            f"[Strategy]{strategy}.training_step": _Action(self, "forward"),
            f"[Strategy]{strategy}.backward": _Action(self, "backward"),
            f"[LightningModule]{module}.optimizer_step": _Action(self, "optimizer"),
            "optimizer_step": _Action(self, "optimizer"),  # its name under manual optimization
        }
        if type(self.inner) is PassThroughProfiler:
            # Lightning's default does nothing, but makes a generator for each hook of each callback to do it. A look
            # into a dictionary gains back what the timing costs.
            self.profile = defaultdict(nullcontext, self.actions).__getitem__

    def enter_loop(self) -> None:
        """A batch is asked for, so the step before is over, unless it is still accumulating."""
        if not self.in_loop:
            self.in_loop = True
            self.timer.phase("pause").__exit__()
        elif self.stepped:
            self._end_step()

    def leave_loop(self) -> None:
        """What follows is no part of training."""
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
        if name == "inner":  # a copy under construction has none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        """Nothing: the user's profiler is torn down by its owner."""


class _Action(_Phase):
    """What the Trainer does as a phase of the timer. Validation does some of it too, which is not timed."""

    def __init__(self, profiler: _StepProfiler, name: str) -> None:
        super().__init__(profiler.timer, name)
        self.profiler = profiler
        self.is_fetch, self.is_transfer, self.is_update = (name == n for n in ("data_wait", "transfer", "optimizer"))

    def __enter__(self) -> None:
        profiler = self.profiler
        # A batch that was fetched ahead is not asked for again: its transfer is then the first sign of a new step.
        is_over = profiler.stepped or (not profiler.in_loop and profiler.trainer.training)
        if self.is_fetch or (self.is_transfer and is_over):
            profiler.enter_loop()
        if profiler.in_loop:
            super().__enter__()

    def __exit__(self, *_: object) -> None:
        if self.timer._current == self.name:  # it was entered in the loop
            self.profiler.stepped |= self.is_update
            super().__exit__()
