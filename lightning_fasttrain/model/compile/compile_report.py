"""Report what a compiler did, and save its cache."""

import io
import json
import os
import platform
import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.safe_load import LARGEST_JSON, parse_json
from lightning_fasttrain.core.messages import explain, number_of, warn

# torch packs graphs but, for CPU kernels, only the C++ source: a second start would compile them again, which takes
# nearly all of the time. So the compiled libraries are stored in the same file, beside torch's part.
_ARTIFACTS, _MACHINE, _VERDICTS = "artifacts", "machine", "verdicts.json"
_LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")


@check_arguments
def save_compile_cache(path: str | os.PathLike[str], verdicts: Mapping[str, object] | None = None) -> int:
    """Save this process's compiled code to one file, completely or not at all; return its bytes (0: nothing to save).

    Args:
        path: path of the file.
        verdicts: plain values that :func:`read_verdicts` returns, added to those in the file.

    Example:
        >>> save_compile_cache(getfixture("tmp_path") / "cache.bin") >= 0
        True
    """
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return 0
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_ARTIFACTS, artifacts[0])
        file.writestr(_MACHINE, machine_of_kernels())
        file.writestr(_VERDICTS, json.dumps({**read_verdicts(path), **(verdicts or {})}))
        for library in kernel_libraries():
            file.write(library, f"{library.parent.name}/{library.name}")
    write_atomic(path, packed.getvalue())
    return len(packed.getvalue())


@check_arguments
def load_compile_cache(path: str | os.PathLike[str]) -> bool:
    """Load a file of :func:`save_compile_cache`, so that this process compiles less.

    Graphs are loaded on any machine; CPU kernels only if processor and versions match, otherwise they are compiled
    again. The file holds compiled code, which will be executed. It is therefore loaded only if it belongs to the user
    who runs this process and no other user may write to it.

    Returns:
        Whether there was one. A damaged file is ignored, with a warning.

    Raises:
        PermissionError: the file belongs to, or can be written by, another user.

    Example:
        >>> load_compile_cache(getfixture("tmp_path") / "none.bin")
        False
    """
    file = Path(path)
    if not file.exists():
        return False
    status = file.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        what = f"compile cache {file} belongs to or can be written by other users"
        why = "it holds code that would be executed"
        raise PermissionError(explain(what, why, f"If you created it, chown it to yourself and chmod go-w {file}"))
    try:
        with zipfile.ZipFile(file) as packed:
            artifacts, machine = packed.read(_ARTIFACTS), packed.read(_MACHINE).decode()
            if machine == machine_of_kernels():
                _unpack_kernels(packed)
    except (zipfile.BadZipFile, zlib.error, KeyError) as damage:
        warn(explain(f"compile cache {file} cannot be read ({damage})", "all code is compiled again", "Delete it"))
        return False
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def read_verdicts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what earlier processes found about the code in a file of :func:`save_compile_cache`; nothing is executed.

    Example:
        >>> read_verdicts(getfixture("tmp_path") / "none.bin")
        {}
    """
    try:
        with zipfile.ZipFile(path) as packed, packed.open(_VERDICTS) as file:
            # One byte more than allowed, since a short file may unpack to a long one.
            verdicts = parse_json(file.read(LARGEST_JSON + 1), f"{path}")
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError):
        return {}  # everything is compared again
    if not isinstance(verdicts, dict):
        return {}
    return verdicts


def machine_of_kernels() -> str:
    """Identify the machines that can run a compiled kernel: kernels are compiled for one specific processor."""
    information = Path("/proc/cpuinfo")
    lines = [platform.processor()]
    if information.exists():
        lines = information.read_text().splitlines()
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join([torch.__version__, platform.platform(), *platform.libc_ver(), *processor])


def kernel_libraries() -> Iterator[Path]:
    """Yield the libraries of kernels that this process compiled or loaded, including the compiler's probes."""
    from torch._inductor import codecache

    for kind in (codecache.CppCodeCache, codecache.CppPythonBindingsCodeCache):
        # Libraries that inductor has loaded in this process, by the key of their source.
        for key in kind.cache:
            library = Path(codecache.get_path(key, "main.so")[2])
            if library.is_file():
                yield library
    for library in Path(codecache.cache_dir()).glob("[a-z0-9][a-z0-9]/*.so"):
        # Files of this name are probes for an instruction set of the processor.
        if not library.name.endswith(".main.so"):
            yield library


def _unpack_kernels(packed: zipfile.ZipFile) -> None:
    from torch._inductor import codecache

    folder = Path(codecache.cache_dir())
    for name in packed.namelist():
        # A name of another form could lead outside of the cache, and an existing file may be in use.
        if _LIBRARY.fullmatch(name) and not (folder / name).exists():
            write_atomic(folder / name, packed.read(name))


@dataclass
class CompileReport:
    """Work of the compiler.

    Attributes:
        graphs: number of compiled graphs, including recompilations.
        recompiles: how many of them were for code already compiled once (new shapes, other guards).
        graph_breaks: reason → number of graph breaks.
        seconds: time spent compiling.
        fallbacks: names of blocks that run eagerly → why.
        apart: for each kind of block that was compared with eager code, the largest relative distance.
        others: for how many blocks code was compiled again since they differ in a value, such as a rate that grows
            from block to block; not part of ``recompiles``.
    """

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    fallbacks: dict[str, str] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    others: int = 0

    def __str__(self) -> str:
        text = (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.recompiles} of them recompilations; "
            f"{sum(self.graph_breaks.values())} graph breaks"
        )
        if self.others:
            text += f"; {number_of(self.others, 'block')} compiled separately, since they differ in a value"
        if self.apart:
            kinds = number_of(len(self.apart), "kind")
            text += f"; {kinds} of block compared with eager code, relative difference at most {max(self.apart):.0e}"
        for reason, times in sorted(self.graph_breaks.items(), key=lambda item: -item[1])[:3]:
            text += f"\n  {times}× {reason.strip().splitlines()[0]}"
        for name, why in self.fallbacks.items():
            text += f"\n  block '{name}' runs uncompiled: {why}"
        return text


class CompileWatch:
    """Counts the compiler's work from now on.

    Example:
        >>> watch = CompileWatch()
        >>> watch.report().graphs
        0
    """

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._utils = utils
        self._breaks = Counter(utils.counters["graph_break"])
        self._compiled = len(self._durations())
        # By identity: torch keeps one list per process, and drops the oldest entries when it is full.
        # References are held, since torch drops old entries, whose ids new ones could reuse.
        self._known = list(utils.get_compilation_metrics())

    def _durations(self) -> list[float]:
        return self._utils.compilation_time_metrics.get("_compile.compile_inner", [])

    def report(self) -> CompileReport:
        durations = self._durations()[self._compiled :]
        # The backward graph has a separate entry, and is not a second compilation.
        known = set(map(id, self._known))
        again = 0
        for metrics in self._utils.get_compilation_metrics():
            _, slash, attempt = (metrics.compile_id or "").rpartition("/")  # "frame/attempt"
            if id(metrics) not in known and metrics.is_forward and slash:
                again += attempt != "0"
        breaks = Counter(self._utils.counters["graph_break"]) - self._breaks
        return CompileReport(len(durations), again, dict(breaks), sum(durations))
