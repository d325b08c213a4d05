"""Keys of the rows of a batch, and of the weights of a module: hashes of their contents, computed on their device."""

import functools
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.files import open_safetensors, write_atomic
from lightning_fasttrain.core.messages import warn_on_any_rank
from lightning_fasttrain.core.modules.parameters import bytes_of, quantized_tensors

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


_FLUSH_BYTES = 2**28
Row = list[Tensor]


class RowStore:
    """A mapping of keys to rows.

    With a folder, rows go to files of up to 256 MiB, each written by one process under a name of its own, and are read
    from there; all processes see a file once it is complete. Without one they stay in host memory.

    Args:
        folder: None keeps all rows in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._rows: dict[bytes, Row] = {}
        self._pending_bytes = 0
        self._filed: dict[bytes, tuple[Any, int]] = {}  # key → open file, and the row in it
        self._files: set[str] = set()
        self.refresh()

    def __deepcopy__(self, memo: object) -> Self:
        return self  # copies of a model share it: keys tell their weights apart

    def __len__(self) -> int:
        return len(self._rows.keys() | self._filed.keys())

    def get(self, key: bytes) -> Row | None:
        """Return the tensors of a row, without the batch's axis; None if it is unknown."""
        row = self._rows.get(key)
        if row is not None or key not in self._filed:
            return row
        file, index = self._filed[key]
        return [file.get_slice(str(number))[index] for number in range(len(file.keys()) - 1)]

    def put(self, key: bytes, row: Row) -> None:
        """Keep a row."""
        if key in self._rows or key in self._filed:
            return
        self._rows[key] = row
        self._pending_bytes += bytes_of(row)
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are in memory alone, and read what other processes have written."""
        if self.folder is None:
            return
        safetensors: Any = require("safetensors.torch", extra="finetune")
        for keys in self._keys_by_shape():
            rows = map(self._rows.__getitem__, keys)
            tensors = {str(number): torch.stack(parts) for number, parts in enumerate(zip(*rows, strict=True))}
            tensors["keys"] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
            name = f"rows-{os.getpid()}-{secrets.token_hex(4)}.safetensors"
            write_atomic(self.folder / name, safetensors.save(tensors))
        self._pending_bytes = 0
        self.refresh()
        for key in self._rows.keys() & self._filed.keys():
            del self._rows[key]

    def _keys_by_shape(self) -> Iterator[list[bytes]]:
        """Yield keys of rows that have the same shapes and dtypes, as those of one file must."""
        groups: dict[object, list[bytes]] = {}
        for key, row in self._rows.items():
            groups.setdefault(tuple((tensor.shape, tensor.dtype) for tensor in row), []).append(key)
        yield from groups.values()

    def refresh(self) -> None:
        """Find the rows in files that are new since the last time."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob("rows-*.safetensors")):
            if path.name not in self._files:
                self._files.add(path.name)
                self._read_keys(path)

    def _read_keys(self, path: Path) -> None:
        try:
            file = open_safetensors(path)
            keys = file.get_tensor("keys")
            lengths = {file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118 (not a mapping)
            if keys.dtype is not torch.uint8 or keys.shape[1:] != (KEY_BYTES,) or lengths != {len(keys)}:
                raise ValueError("its tensors are not rows with keys")
        except Exception as error:
            warn_on_any_rank(f"FrozenCache: {path} is damaged and not used ({error}). Remove it.")
            return
        for index, key in enumerate(keys.numpy()):
            self._filed.setdefault(key.tobytes(), (file, index))
