"""Milliseconds of a training step by phase, and its throughput."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter

import torch

from lightning_fasttrain.core.checks import NonNegativeInt, check_arguments, one_of

PHASES = ("data_wait", "transfer", "forward", "backward", "optimizer", "pause")
# The latest steps only, since a long run must not keep the times of every step.
_KEPT_STEPS = 1000
_Mark = tuple[str, torch.cuda.Event]  # where an interval of a phase ends on the device
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
            event = torch.cuda.Event(enable_timing=True)
            # The current stream: a step may run on another than the default one.
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((self._current, event))
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
