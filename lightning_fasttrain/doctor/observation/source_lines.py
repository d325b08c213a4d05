"""Find the line of the user's own code that a stack of calls comes from, and lines of the user's sources by content."""

import ast
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import lightning_fasttrain

_OWN = str(Path(lightning_fasttrain.__file__).parent) + os.sep


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

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file)}:{self.number}"


class Call(NamedTuple):
    """Where the running code was called from.

    Attributes:
        line: the innermost line of the user's code; None outside of it.
        package: top-level package of the function that this line called; "" if the line itself runs.
        function: name of that function.
    """

    line: SourceLine | None
    package: str = ""
    function: str = ""


def find_call(frame: FrameType | None) -> Call:
    """Walk from a frame outwards to the first one in the user's own code."""
    callee: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            line = SourceLine(file, frame.f_lineno, frame.f_code.co_name)
            if callee is None:
                return Call(line)
            package = str(callee.f_globals.get("__name__", "")).partition(".")[0]
            return Call(line, package, callee.f_code.co_name)
        if not file.startswith(_OWN):
            callee = frame
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
    return not any(file.startswith(folder) for folder in _library_folders())


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


def find_calls(name: str, files: list[str] | None = None) -> Iterator[tuple[SourceLine, ast.Call]]:
    """Yield the calls of a function or method of this name in the user's files, from top to bottom."""
    for file in user_files() if files is None else files:
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.Call) and _called(node) == name:
                yield SourceLine(file, node.lineno), node


def find_keyword(name: str) -> SourceLine | None:
    """Return the only line of the user's files that passes a keyword argument of this name; None if not exactly one."""
    found = []
    for file in user_files():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.keyword) and node.arg == name:
                found.append(SourceLine(file, node.lineno))
    return found[0] if len(found) == 1 else None


def find_only_call(name: str) -> SourceLine | None:
    """Return the line of the only call of this name in the user's files; None if there is not exactly one."""
    found = [line for line, _ in find_calls(name)]
    return found[0] if len(found) == 1 else None


def find_attribute(name: str) -> SourceLine | None:
    """Return the line of the user's files that sets ``self.name``; None if there is not exactly one."""
    found = []
    for file in user_files():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                found.append(SourceLine(file, node.lineno))
    return found[0] if len(found) == 1 else None


def find_hook(kind: str, hook: str) -> SourceLine | None:
    """Return the first line of a method of a class in the user's files; None if they do not define it."""
    for file in user_files():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.ClassDef) and node.name == kind:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == hook:
                        return SourceLine(file, method.lineno, hook)
    return None


def find_growth(name: str, file: str) -> SourceLine | None:
    """Return the line of a file that appends to what is called ``name``; None if there is not exactly one."""
    found = []
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.AugAssign) and _last_name(node.target) == name:
            found.append(SourceLine(file, node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            adds = node.func.attr in ("append", "extend", "add", "insert", "setdefault")
            if adds and _last_name(node.func.value) == name:
                found.append(SourceLine(file, node.lineno))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == name:
            found.append(SourceLine(file, node.lineno))
    return found[0] if len(found) == 1 else None


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


@functools.cache
def _parse(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.parse("")
