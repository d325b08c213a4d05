"""Compiled code, saved to a file by one process and loaded by another."""

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

# torch packs graphs but, for CPU kernels, only the C++ source: a second start would compile them again, which takes
# nearly all of the time. So the compiled libraries are stored in the same file, beside torch's part.
_ARTIFACTS, _MACHINE, _VERDICTS = "artifacts", "machine", "verdicts.json"
_LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")


def save_compile_cache(path: str | os.PathLike[str], verdicts: Mapping[str, Any] | None = None) -> int:
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
        with zipfile.ZipFile(path) as packed:
            return json.loads(packed.read(_VERDICTS))
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, ValueError):
        return {}  # everything is compared again


def machine_of_kernels() -> str:
    """Identify the machines that can run a compiled kernel: kernels are compiled for one specific processor."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else [platform.processor()]
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
        if not library.name.endswith(".main.so"):  # a probe for an instruction set of the processor
            yield library


def _unpack_kernels(packed: zipfile.ZipFile) -> None:
    from torch._inductor import codecache

    folder = Path(codecache.cache_dir())
    for name in packed.namelist():
        # A name of another form could lead outside of the cache, and an existing file may be in use.
        if _LIBRARY.fullmatch(name) and not (folder / name).exists():
            write_atomic(folder / name, packed.read(name))
