"""Attribute the time of steps to lines of the user's code, by looking at the running line every few milliseconds."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from lightning_fasttrain.doctor.observation.source_lines import Call, find_call

_INTERVAL_S = 0.004
# Python code that holds the interpreter is asked to let the sampler in after this time, not after 5 ms.
_SWITCH_S = 0.0005


class Running(NamedTuple):
    """The running code: the phase of the step, and the line of the user's code."""

    phase: str
    call: Call


@dataclass
class Sampled:
    """The time that a line took.

    Attributes:
        seconds: in all active steps together.
        samples: number of times that it was seen running.
    """

    seconds: float = 0.0
    samples: int = 0


class LineSampler:
    """A thread that looks at the thread which created it, while :attr:`active` is set.

    Args:
        phase: returns the name of the current phase.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.active = False
        self.found: dict[Running, Sampled] = {}
        self._phase = phase
        self._watched = threading.get_ident()
        self._end = threading.Event()
        self._switch_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="fasttrain doctor", daemon=True)

    def start(self) -> None:
        """Start looking."""
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and restore Python's switch interval."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        last = perf_counter()
        while not self._end.wait(_INTERVAL_S):
            now = perf_counter()
            if self.active:
                self._look(now - last)
            last = now

    def _look(self, seconds: float) -> None:
        # Not kept in a variable: a frame would keep the tensors of the step.
        running = Running(self._phase(), find_call(sys._current_frames().get(self._watched)))
        sampled = self.found.setdefault(running, Sampled())
        sampled.seconds += seconds
        sampled.samples += 1
