"""Rows of tensors by key: in memory, or in safetensors files that several processes may write and read."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.safe_load import open_safetensors
from lightning_fasttrain.core.messages import warn_on_any_rank
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.finetune.frozen_cache.content_keys import KEY_BYTES

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
