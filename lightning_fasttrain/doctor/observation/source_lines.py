"""Find lines of the user's code, and time them: where the host spends the time of a step."""

import ast
import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

# Methods by which a container grows.
_ADDING = ("append", "extend", "add", "insert", "setdefault")
_OWN = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True, order=True)
class SourceLine:
    """A line of the user's code.

    Attributes:
        file: path of the file.
        number: number of the line, from 1.
        function: name of the function that it is in.
    """

    file: str
    number: int
    function: str = ""

    @property
    def text(self) -> str:
        """The line itself, without its indentation."""
        return linecache.getline(self.file, self.number).strip()

    def context(self, lines: int) -> list[tuple[int, str]]:
        """Return the line with its neighbours: their numbers, and their text without line ends."""
        found = []
        for number in range(max(1, self.number - lines), self.number + lines + 1):
            text = linecache.getline(self.file, number)
            if text:
                found.append((number, text.rstrip()))
        return found

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file)}:{self.number}"


class Call(NamedTuple):
    """A call from the user's code into a library.

    Attributes:
        line: the innermost line of the user's code; None outside of it.
        package: top-level package that this line called, another one than torch if there is one on the way; "" if the
            line itself runs.
        function: name of the function that this line called.
    """

    line: SourceLine | None
    package: str = ""
    function: str = ""


def find_call(frame: FrameType | None, beyond: str = "") -> Call:
    """Walk from a frame outwards to the first one in the user's own code.

    Args:
        frame: where to start.
        beyond: name of functions of the user that are passed over, such as "forward".
    """
    package = function = ""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename) and code.co_name != beyond:
            return Call(SourceLine(code.co_filename, frame.f_lineno, code.co_name), package, function)
        if not code.co_filename.startswith(_OWN):
            function = code.co_name
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if name != "torch" or not package:
                package = name
        frame = frame.f_back
    return Call(None)


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file is neither of an installed package, nor of Python, nor of this package.

    Example:
        >>> is_user_file(linecache.__file__), is_user_file("<string>"), is_user_file("/home/me/train.py")
        (False, False, True)
    """
    if file.startswith("<") or file.startswith(_OWN):
        return False
    return not file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {str(Path(path).resolve()) for path in found}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(path + os.sep for path in sorted(found))


def user_files() -> list[str]:
    """Return the files of the user's code that are imported in this process, the script first."""
    found = []
    modules = dict(sys.modules)
    for module in [modules.get("__main__"), *modules.values()]:
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and is_user_file(file) and file not in found:
            found.append(file)
    return found


def find_only_call(name: str, of: str = "") -> SourceLine | None:
    """Return the line of the only call of a function, class or method of this name; None if there is not one.

    Args:
        name: of what is called.
        of: what stands before the dot; "" for anything.
    """

    def calls_it(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or _last_name(node.func) != name:
            return False
        return not of or (isinstance(node.func, ast.Attribute) and _last_name(node.func.value) == of)

    return _find_only(calls_it)


def has_method_call(name: str) -> bool:
    """Whether the user's code calls a method of this name anywhere."""
    for file in user_files():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                return True
    return False


def find_keyword(name: str) -> SourceLine | None:
    """Return the only line that passes a keyword argument of this name; None if there is not exactly one."""
    return _find_only(lambda node: isinstance(node, ast.keyword) and node.arg == name)


def find_attribute(name: str) -> SourceLine | None:
    """Return the only line that sets ``self.name``; None if there is not exactly one."""

    def sets_it(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)

    return _find_only(sets_it)


def find_growth(name: str, file: str) -> SourceLine | None:
    """Return the line of a file that adds to what is called ``name``; None if there is not exactly one."""
    return _find_only(lambda node: _grows(node, name), [file])


def _grows(node: ast.AST, name: str) -> bool:
    """Whether a node is ``name += x``, ``name.append(x)`` or the like, or ``name[x] = y``."""
    if isinstance(node, ast.AugAssign):
        return _last_name(node.target) == name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _ADDING and _last_name(node.func.value) == name
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == name


def _find_only(is_it: Callable[[ast.AST], bool], files: list[str] | None = None) -> SourceLine | None:
    """Return the only such node of the script, or of the first other file of the user that has any."""
    for file in files or user_files():
        found = [node for node in ast.walk(_parse(file)) if is_it(node)]
        if len(found) == 1:
            return SourceLine(file, getattr(found[0], "lineno", 0))
        if found:
            return None
    return None


def find_hook(kind: str, hook: str) -> SourceLine | None:
    """Return the first line of a method of a class in the user's files; None if they do not define it."""
    for file in user_files():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.ClassDef) and node.name == kind:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == hook:
                        return SourceLine(file, method.lineno, hook)
    return None


def _last_name(node: ast.expr) -> str:
    """Return "c" of the expression ``a.b.c``; "" of anything else than names and attributes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _parse(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.parse("")


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
