"""Refuse values in a checkpoint that could not be read back without running code that the file names."""

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain

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
        raise ValueError(explain(f"checkpoint entry {where or 'itself'} of class {type(value).__name__}", why, way_out))


def _find_unreadable(value: Any, where: str, seen: set[int]) -> tuple[str, Any] | None:
    """The first entry that cannot be read back, with the path to it."""
    kind = type(value)  # exactly: a subclass is written with its own name, which is refused
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
