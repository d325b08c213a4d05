"""Attribute time to lines of the user's code: by looking at the running line every few milliseconds, or by tracing.

Looking slows nothing down. Where a C function holds the interpreter, as ``torch.tensor(list)`` does, it sees the next
line instead, and so the lines that load a batch are traced.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

from lightning_fasttrain.doctor.observation.source_lines import Call, SourceLine, find_call, is_user_file

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


class LineTracer:
    """Context that adds up the time of each line of the user's functions, while ``active``.

    A line counts with all that it calls outside of the user's files, and with the comprehensions in it. Nothing is
    traced where a debugger or a coverage tool traces already.

    Attributes:
        active: whether the next ``with`` block is traced.
        found: time and number of executions of each line.
        total_s: time of the traced blocks.
    """

    def __init__(self) -> None:
        self.active = False
        self.found: dict[SourceLine, Sampled] = {}
        self.total_s = 0.0
        self._lines: list[SourceLine] = []
        self._since = self._began = 0.0
        self._traces = False

    def __enter__(self) -> None:
        self._traces = self.active and sys.gettrace() is None
        if self._traces:
            self._began = perf_counter()
            sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        if self._traces:
            sys.settrace(None)
            self.total_s += perf_counter() - self._began

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_name.startswith("<") or not is_user_file(code.co_filename):
            return None
        self._add_time()
        self._lines.append(SourceLine(code.co_filename, frame.f_lineno, code.co_name))
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self._add_time()
        if event == "line":
            line = SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            self._lines[-1] = line
            self.found.setdefault(line, Sampled()).samples += 1
        elif event == "return":
            self._lines.pop()
        return self._trace

    def _add_time(self) -> None:
        """Add the time since the last event to the line that ran."""
        now = perf_counter()
        if self._lines:
            self.found.setdefault(self._lines[-1], Sampled()).seconds += now - self._since
        self._since = now
