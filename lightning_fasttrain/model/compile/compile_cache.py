"""Compiled code, saved to a file by one process and loaded by the next."""

import io
import json
import os
import platform
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.messages import explain, warn

# What torch packs are graphs, and of kernels for a CPU the C++ source alone: a second start would compile them again,
# and that is nearly all of its time. So the libraries that were made of it go into the same file, beside torch's part.
_ARTIFACTS, _MACHINE, _VERDICTS = "artifacts", "machine", "verdicts.json"
_LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")


def save_compile_cache(path: str | os.PathLike[str], verdicts: Mapping[str, Any] | None = None) -> int:
    """Write what this process has compiled to one file, whole or not at all; returns its bytes (0: nothing to save).

    Args:
        path: of the file.
        verdicts: plain values that :func:`read_verdicts` returns, added to those that are in the file.

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


def load_compile_cache(path: str | os.PathLike[str]) -> bool:
    """Load a file of :func:`save_compile_cache`, so that this process compiles less.

    Graphs are loaded on any machine; kernels for the CPU where processor and versions are those that they were
    compiled for, and otherwise they are compiled again. The file holds compiled code, which will be executed. So it is
    taken only if it belongs to the user who runs this process and nobody else may write to it.

    Returns:
        Whether there was one. One that is damaged is left alone, with a warning.

    Raises:
        PermissionError: it belongs to, or can be written by, somebody else.

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
        raise PermissionError(explain(what, why, f"If you made it: chown it to yourself and chmod go-w {file}"))
    try:
        with zipfile.ZipFile(file) as packed:
            artifacts, machine = packed.read(_ARTIFACTS), packed.read(_MACHINE).decode()
            if machine == machine_of_kernels():
                _unpack_kernels(packed)
    except (zipfile.BadZipFile, zlib.error, KeyError) as damage:
        warn(explain(f"compile cache {file} cannot be read ({damage})", "all is compiled again", "Delete it"))
        return False
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def read_verdicts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What earlier processes have found of the code in a file of :func:`save_compile_cache`; nothing is run.

    Example:
        >>> read_verdicts(getfixture("tmp_path") / "none.bin")
        {}
    """
    try:
        with zipfile.ZipFile(path) as packed:
            return json.loads(packed.read(_VERDICTS))
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, ValueError):
        return {}  # then all is compared again


def machine_of_kernels() -> str:
    """What a compiled kernel may be run on: they are compiled for the very processor that they are made on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join([torch.__version__, platform.platform(), *platform.libc_ver(), *processor])


def kernel_libraries() -> Iterator[Path]:
    """The libraries of the kernels that this process has compiled or loaded, and of the compiler's own trials."""
    from torch._inductor import codecache

    for kind in (codecache.CppCodeCache, codecache.CppPythonBindingsCodeCache):
        # What inductor has loaded in this process, by the key of its source.
        for key in kind.cache:
            library = Path(codecache.get_path(key, "main.so")[2])
            if library.is_file():
                yield library
    for library in Path(codecache.cache_dir()).glob("[a-z0-9][a-z0-9]/*.so"):
        if not library.name.endswith(".main.so"):  # one tells whether the processor knows a set of instructions
            yield library


def _unpack_kernels(packed: zipfile.ZipFile) -> None:
    from torch._inductor import codecache

    folder = Path(codecache.cache_dir())
    for name in packed.namelist():
        # A name of another form could lead out of the cache; and what is there already may be in use.
        if _LIBRARY.fullmatch(name) and not (folder / name).exists():
            write_atomic(folder / name, packed.read(name))
