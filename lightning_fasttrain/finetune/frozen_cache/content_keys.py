"""Keys of the rows of a batch, and of the weights of a module: hashes of their contents, computed on their device."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_fasttrain.core.modules.parameters import quantized_tensors

KEY_BYTES = 16
_WORDS = 2**14  # 32-bit words of a chunk
_LANES = 3  # independent sums of a chunk, of 64 bits each


def row_keys(args: Sequence[object], kwargs: Mapping[str, object], context: bytes) -> list[bytes]:
    """Return a key for each row of a batch: a hash of the row in each tensor, and of everything that rows share.

    The host waits once for the device.

    Args:
        args: positional arguments of a module; tensors with as many rows as the first one are cut into rows.
        kwargs: keyword arguments.
        context: hashed with each row.

    Raises:
        TypeError: an argument is neither a tensor nor a plain value, so that it cannot be hashed.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> first, second, third = row_keys([x], {}, b"")
        >>> first == third != second, first == row_keys([x[:1]], {}, b"")[0], first == row_keys([x[:1]], {}, b"b")[0]
        (True, True, False)
    """
    leaves, structure = tree_flatten((list(args), kwargs))
    rows = count_rows(leaves)
    shared = hashlib.blake2b(context + repr(structure).encode(), digest_size=KEY_BYTES)
    cut = []
    for leaf in leaves:
        if is_cut(leaf, rows):
            shared.update(f"{leaf.dtype} {tuple(leaf.shape[1:])}".encode())
            cut.append(_sums(leaf.reshape(rows, -1)))
        elif isinstance(leaf, Tensor):
            shared.update(hash_tensors([leaf]))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
            shared.update(repr(leaf).encode())
        else:
            raise TypeError(f"an argument is a {type(leaf).__name__}, which has no contents to compare")
    sums = torch.cat(cut, dim=1).cpu().numpy()
    return [hashlib.blake2b(shared.digest() + row.tobytes(), digest_size=KEY_BYTES).digest() for row in sums]


def count_rows(leaves: Iterable[object]) -> int:
    """Return the length of the first tensor that has an axis; 0 if there is none."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


def is_cut(leaf: object, rows: int) -> bool:
    """Whether an argument has one entry for each row of the batch."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows


def hash_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Return a hash of dtypes, shapes and contents."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_sums(tensor.detach().reshape(1, -1)).cpu().numpy().tobytes())
    return digest.digest()


def hash_module(module: nn.Module) -> bytes:
    """Return a hash of a module's layers, settings, parameters and buffers.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = hash_module(layer)
        >>> _ = layer.weight.data[0, 0].add_(1e-6)
        >>> before == hash_module(layer)
        False
    """
    digest = hashlib.blake2b(f"{module} {getattr(module, 'config', '')}".encode(), digest_size=KEY_BYTES)
    for tensors in (module.named_parameters(), module.named_buffers(), quantized_tensors(module)):
        for name, tensor in tensors:
            digest.update(name.encode() + hash_tensors([tensor]))
    return digest.digest()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20250601)
    return torch.randint(-(2**62), 2**62, (_LANES, _WORDS), generator=generator).mul_(2).add_(1).to(device)


def _sums(rows: Tensor) -> Tensor:
    """Map (rows, elements) to (rows, chunks · lanes): sums of words times random odd factors, modulo 2⁶⁴.

    Integer sums are the same in any order, so keys do not depend on the device's kernels. Words have 32 bits: with 64,
    changes in the highest bits of two words would cancel.
    """
    if rows.numel() == 0:
        return torch.zeros(len(rows), 0, dtype=torch.int64, device=rows.device)
    content = rows.contiguous().view(torch.uint8)
    chunk = min(4 * _WORDS, content.shape[1] + -content.shape[1] % 4)  # in bytes
    padded = F.pad(content, (0, -content.shape[1] % chunk))
    words = padded.view(torch.int32).long().unflatten(1, (-1, chunk // 4))
    return torch.cat([(words * lane).sum(-1) for lane in _factors(rows.device)[:, : chunk // 4]], dim=1)
