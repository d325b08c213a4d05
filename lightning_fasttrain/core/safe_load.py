"""Read files without trust: no code in them is run, and no more memory is allocated than they hold."""

import io
import json
import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import MAP_LOCATION

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.messages import explain, first_line

_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)


def refuse_unreadable(values: object) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse, before anything is written.

    Tensors and plain values are recognised by their class; only other values are written and read, in memory.

    Raises:
        ValueError: names the entry by its path, and its class.

    Example:
        >>> refuse_unreadable({"callbacks": {"mine": [1, 2.5, "three"]}})
        >>> from pathlib import Path
        >>> refuse_unreadable({"callbacks": {"mine": [Path("data")]}})
        Traceback (most recent call last):
        ValueError: checkpoint entry ['callbacks']['mine'][0] of class ...Path: it is of a class that could ...
    """
    found = _find_unreadable(values, "", set())
    if found is not None:
        where, value = found
        why = "it is of a class that could only be read back by running code from the file, which is refused"
        way_out = "Keep numbers, strings, tensors, and lists and dicts of these, in state_dict() and hyper-parameters"
        if type(value).__module__.startswith("omegaconf"):
            way_out = "Save plain Python, such as save_hyperparameters(OmegaConf.to_container(cfg, resolve=True))"
        raise ValueError(explain(f"checkpoint entry {where or 'itself'} of class {type(value).__name__}", why, way_out))


def _find_unreadable(value: Any, where: str, seen: set[int]) -> tuple[str, Any] | None:
    """Return the first entry that cannot be read back, with the path to it."""
    # The exact class: a subclass is written with its own name, which is refused.
    kind = type(value)
    if kind in _PLAIN or id(value) in seen:
        return None
    if kind not in _CONTAINERS:
        return None if _comes_back(value) else (where, value)
    seen.add(id(value))
    if isinstance(value, dict):
        items = [(f"{where}[{key!r}]", part) for key, item in value.items() for part in (key, item)]
    else:
        items = [(f"{where}[{number}]", item) for number, item in enumerate(value)]
    for place, item in items:
        found = _find_unreadable(item, place, seen)
        if found is not None:
            return found
    return None


def _comes_back(value: object) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # pickle, torch and the object itself each have their own
        return False
    return True


# In bytes; the index of a model of 700 billion parameters has nine million.
LARGEST_JSON = 32 * 2**20
MOST_AXES = 16
MOST_PARTS, LONGEST_NAME = 100, 2000  # of a tensor's name: nested modules, and characters
_STORAGE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "hdfs", "memory"}
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError, NotImplementedError)
# What torch's unpickler says of objects that it refuses; any other message is taken for damage.
_FOREIGN = ("Unsupported global", "unrecognized function", "whose module", "Can only build", "Can only create")
_BYTEARRAY, _SMALL = b"bytearray", 2**24


class CorruptCheckpoint(ValueError):
    """Error for a checkpoint that is truncated, changed, or not a checkpoint; the message names file and reason."""


class ForeignObjects(ValueError, pickle.UnpicklingError):
    """Error for a file with objects that can only be created by running code that the file names."""


@contextmanager
def as_corrupt(path: str | os.PathLike[str], *more: type[BaseException]) -> Iterator[None]:
    """Turn errors of Python and torch about damaged content into :class:`CorruptCheckpoint`; our own errors pass."""
    try:
        yield
    except (CorruptCheckpoint, ForeignObjects, OSError):
        raise
    except (Exception, *more) as error:
        why = f"its content does not fit together ({type(error).__name__}: {first_line(error)})"
        raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one")) from error


def is_remote(path: object) -> bool:
    """Return whether ``path`` is an address, such as ``http://…`` or ``s3://…``, instead of a local path."""
    return "://" in str(path)


def is_object_storage(path: object) -> bool:
    """Return whether ``path`` is in a file system of fsspec that a run may keep checkpoints in, such as ``s3://…``.

    Web addresses, archives and chains such as ``zip::…`` are not: nothing is fetched from them.
    """
    protocol, found, _ = str(path).partition("://")
    return bool(found) and protocol in _STORAGE


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if it is a path of this machine, whether or not it exists.

    Raises:
        ValueError: it is an address, or empty, which would be the current folder.

    Example:
        >>> local_path("https://example.com/last.ckpt")
        Traceback (most recent call last):
        ValueError: https://example.com/last.ckpt: it is an address, and ... Download it first, and give its path.
    """
    if is_remote(path):
        why = "it is an address, and files are read from this machine only"
        raise ValueError(explain(f"{path}", why, "Download it first, and give its path"))
    if str(path) == "" or "\0" in str(path):
        raise ValueError(explain(f"path {str(path)!r}", "it names neither a file nor a folder", "Give one of them"))
    return Path(path)


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint's path if there is a file or folder of this machine.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is an address, or empty.
    """
    path = local_path(path)
    if not path.exists():
        raise FileNotFoundError(explain(f"{path}", "there is no such checkpoint", f"Look into '{path.parent}'"))
    return path


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it is not valid JSON, has more than ``largest`` bytes, or has a key twice.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(explain(f"{path}", "there is no such file", "Check the name"))
    with open(path, "rb") as file:
        data = file.read(largest + 1)  # one more shows that there are more
    return parse_json(data, f"{path}", largest)


def parse_json(data: bytes | str, what: str, largest: int = LARGEST_JSON) -> Any:
    """Parse JSON that is not trusted.

    Raises:
        ValueError: it is not valid JSON, has more than ``largest`` bytes, a key twice, or NaN.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "the settings")
        Traceback (most recent call last):
        ValueError: the settings cannot be read: it is not valid JSON ('a' is there twice). Fetch it again.
    """
    if len(data) > largest:
        raise ValueError(
            explain(f"{what} has more than {largest} bytes", "a file of this kind needs far fewer", "Do not use it")
        )
    try:
        return json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        why = f"it is not valid JSON ({first_line(error)})"
        raise ValueError(explain(f"{what} cannot be read", why, "Fetch it again")) from error


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:80]!r} is there twice")
        found[key] = value
    return found


def damage_of_archive(path: Path, *, contents: bool = True) -> str | None:
    """Return what is wrong with a file of ``torch.save``; None if it is complete.

    Args:
        path: the file.
        contents: whether to read all of it, and compare it with its checksums; otherwise only its list of entries.
    """
    if not path.is_file():
        return "it is neither a file nor a folder"
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            reason = _unfit_entries(archive, size)
            if reason is not None or not contents:
                return reason
            # It unpacks every entry, so not before they were found fit.
            broken = archive.testzip()
        # Torch's reader is stricter about the archive's own structure.
        torch._C.PyTorchFileReader(os.fspath(path)).get_all_records()
    except _BROKEN_ZIP as error:  # RuntimeError: encrypted
        return f"its {size} bytes are not an archive of torch.save ({first_line(error)})"
    return f"{broken} in it was changed: its checksum is another" if broken is not None else None


def _unfit_entries(archive: zipfile.ZipFile, size: int) -> str | None:
    """Return a reason not to unpack an archive: ``torch.save`` neither compresses entries nor lets them overlap."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return "it is not an archive of torch.save: something in it is compressed, and could be of any size"
    if sum(entry.file_size for entry in entries) > size:
        return f"it is not an archive of torch.save: its entries are larger than its {size} bytes"
    for entry in entries:
        if entry.filename.endswith("data.pkl") and _asks_for_memory(archive.read(entry), max(size, _SMALL)):
            return "it asks for more memory than it has bytes"
    return None


def _asks_for_memory(pickled: bytes, most: int) -> bool:
    """Return whether a pickle calls ``bytearray(n)``, the only call that torch allows and that allocates n bytes."""
    if _BYTEARRAY not in pickled:
        return False
    try:
        return any(isinstance(value, int) and value > most for op, value, _ in pickletools.genops(pickled))
    except (ValueError, IndexError):
        return False  # which whoever loads it will say


def read_archive(path: str | os.PathLike[str], *, map_location: MAP_LOCATION = "cpu", mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` that holds tensors and plain values only.

    Args:
        path: the file; one that holds objects of other classes is refused.
        map_location: as for ``torch.load``.
        mmap: leave tensors in the file until they are used.

    Raises:
        CorruptCheckpoint: it is damaged, or not a file of ``torch.save``.
        ForeignObjects: it holds other objects; none of their code was run.
        FileNotFoundError: there is no such file.

    Example:
        >>> path = getfixture("tmp_path") / "one.ckpt"
        >>> torch.save({"step": 3}, path)
        >>> read_archive(path)
        {'step': 3}
    """
    path = existing_path(path)
    refuse_unfit(path)
    try:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except Exception as error:  # what a damaged or hostile file makes of an unpickler has many names
        if any(phrase in str(error) for phrase in _FOREIGN):
            why = f"to make them is to run code from the file, so weights_only=True refuses it: {unsafe_names(path)}"
            way_out = "If you know where it comes from, load it with weights_only=False"
            raise ForeignObjects(explain(f"{path} holds objects of other classes", why, way_out)) from error
        why = f"it is damaged ({type(error).__name__}: {first_line(error)})"
        raise CorruptCheckpoint(explain(f"{path} cannot be read", why, "Use an older one")) from error


def refuse_unfit(path: Path) -> None:
    """Refuse what is not an archive of ``torch.save``, or one that would take more memory than it has bytes."""
    reason = damage_of_archive(path, contents=False)
    if reason is not None:
        raise CorruptCheckpoint(explain(f"{path} cannot be read", reason, "Use an older one"))


def unsafe_names(path: Path) -> str:
    """Return the first three classes in a file that torch does not consider safe."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a damaged file, which has been said
        names = []
    return ", ".join(name[:100] for name in names[:3]) or "something that is not a class"


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file after a check of its header: names, axes and sizes must be plausible.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, not a safetensors file, or its header is not that of a model.
    """
    safetensors: Any = require("safetensors", extra="finetune")
    if not path.is_file():
        raise FileNotFoundError(explain(f"{path}", "there is no such file", "Name a .safetensors file"))
    try:
        _refuse_odd_header(path)
        return safetensors.safe_open(str(path), framework="pt")
    except Exception as error:
        why = f"it is cut short, or no safetensors file ({first_line(error)})"
        raise ValueError(explain(f"{path} cannot be read", why, "Fetch it again")) from error


def _refuse_odd_header(path: Path) -> None:
    largest = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        # The format: eight bytes say how long the header is, and nothing says that they are true.
        data = file.read(size) if 0 <= size <= min(LARGEST_JSON, largest) else b""
    if len(data) != size:
        raise ValueError("it has no header")
    for name, entry in parse_json(data, "its header").items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name[:120]!r} has no shape")
        if len(shape) > MOST_AXES:
            raise ValueError(f"{name[:120]!r} has {len(shape)} axes")
        if len(name) > LONGEST_NAME or name.count(".") >= MOST_PARTS:
            raise ValueError(f"the name {name[:120]!r}… has {len(name)} characters and {name.count('.') + 1} parts")
        if math.prod(shape) > largest * 8:  # no element takes less than a bit
            raise ValueError(f"{name[:120]!r} would have {math.prod(shape)} elements")
