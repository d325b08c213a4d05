"""How much is in a batch, how many numbers a model has, and bytes in words."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def count_batch(batch: Any) -> tuple[int, int]:
    """Samples and tokens in a batch: the length of its first tensor, and the entries of the first one that looks
    like token ids (whole numbers of 32 or 64 bits, at least two axes); 0 for what is not there.

    Example:
        >>> import torch
        >>> count_batch({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), count_batch([torch.zeros(4, 3)])
        ((4, 512), (4, 0))
    """
    samples, parts = 0, [batch]
    for part in parts:  # grows while it is walked
        if isinstance(part, Tensor):
            samples = samples or (len(part) if part.ndim else 0)
            if part.ndim > 1 and part.dtype in (torch.int64, torch.int32):
                return samples, part.numel()
        elif isinstance(part, list | tuple):
            parts.extend(part)
        elif isinstance(part, Mapping):
            parts.extend(part.values())
    return samples, 0


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers train, and how many there are, with 4-bit weights counted as what they stand for.

    Of a parameter that a strategy holds in pieces the whole counts, of one that has no shape yet nothing.
    """
    trained = total = 0
    for parameter in model.parameters():
        numbers = 0 if is_lazy(parameter) else _numbers(parameter)
        total += numbers
        trained += numbers if parameter.requires_grad else 0
    return trained, total


def _numbers(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)
    # A 4-bit weight holds two numbers in a byte. A parameter that DeepSpeed has split up holds none itself.
    return state.shape.numel() if state is not None else getattr(parameter, "ds_numel", parameter.numel())


def format_bytes(nbytes: float) -> str:
    """Bytes for people: GiB, or MiB and KiB where it is less than one.

    Example:
        >>> format_bytes(3 * 2**30), format_bytes(1536), format_bytes(7)
        ('3.00 GiB', '1.50 KiB', '7 B')
    """
    for unit, size in UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def number_of(count: int, thing: str, things: str = "") -> str:
    """A number and what is counted.

    Example:
        >>> number_of(1, "rank"), number_of(1200, "rank"), number_of(2, "batch", "batches")
        ('1 rank', '1,200 ranks', '2 batches')
    """
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"


def count_bytes(batch: Any) -> int:
    """The bytes of all tensors in a batch.

    Example:
        >>> import torch
        >>> count_bytes({"ids": torch.zeros(2, 3), "names": ["a", "b"]})
        24
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
