"""What a checkpoint holds beside tensors of model and optimizer: only what can be read back without running code."""

import io
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._messages import explain


def write_plain(path: Path, values: dict[str, Any]) -> None:
    """Write ``values``, once it is sure that ``torch.load(weights_only=True)`` will read them.

    Raises:
        ValueError: names the entry that it would refuse.
    """
    data = _bytes(values)
    if not _readable(data):
        culprit = _culprit(values)
        raise ValueError(
            explain(
                f"checkpoint entry {culprit}",
                "it is of a class that could only be read back by running code from the file, which is refused",
                "Keep numbers, strings, tensors, and lists and dicts of these, in state_dict() and hyper-parameters",
            )
        )
    write_atomic(path, data)


def _bytes(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _readable(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _culprit(values: Any) -> str:
    """The path to the smallest entry that cannot be read back, and its class."""
    if isinstance(values, dict | list | tuple):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in items:
            if not _readable(_bytes(value)):
                inner = _culprit(value)
                return f"[{key!r}]{inner}" if inner.startswith(("[", " ")) else f"[{key!r}] {inner}"
    return f" of class {type(values).__name__}"
