"""A checksum of a batch, by which a resumed run tells whether it reads what the saved run has read."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST = 1024  # entries of a tensor or container that are read


def checksum(batch: object) -> int:
    """Return a number that follows from the contents of a batch: up to 1,024 entries of each tensor, spread over it.

    Of a tensor that is not on the CPU only shape and dtype count, so that nothing waits for a device.

    Example:
        >>> batch = {"ids": torch.arange(6), "names": ["a", "b"]}
        >>> checksum(batch) == checksum({"ids": torch.arange(6), "names": ["a", "b"]})
        True
        >>> checksum(batch) == checksum({"ids": torch.arange(6).flip(0), "names": ["a", "b"]})
        False
    """
    number, waiting = 0, [batch]
    while waiting:
        value = waiting.pop()
        number = zlib.crc32(_read(value), number)
        waiting.extend(_parts(value))
    return number


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | np.ndarray):
        return ()
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()][:_MOST]
    if isinstance(value, list | tuple):
        return value[:_MOST]
    return list(getattr(value, "__dict__", {}).values())


def _read(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value) if value.flags.writeable else torch.from_numpy(value.copy())
    if not isinstance(value, Tensor):
        is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        return repr(value).encode() if is_plain else type(value).__name__.encode()
    kind = f"{value.dtype} {tuple(value.shape)}".encode()
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_nested or value.numel() == 0:
        return kind
    # An odd step does not fall on the same column of each row.
    some = value.detach().reshape(-1)[:: (value.numel() // _MOST) | 1].contiguous()
    return kind + some.view(torch.uint8).numpy().tobytes()
