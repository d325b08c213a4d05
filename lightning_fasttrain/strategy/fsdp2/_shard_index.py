"""Index of a sharded checkpoint, as JSON: which file holds which shard of which tensor.

``torch.distributed.checkpoint`` pickles its own index, and unpickling a file can run any code in it. That index stays
in the folder for torch's tools, and is never read here.
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.safe_load import MOST_AXES, CorruptCheckpoint, as_corrupt, read_json
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.tensor_parallel.layouts import in_chunks

INDEX = "index.json"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Bytes of an index; ten thousand tensors on a hundred ranks need a tenth of that.
_LARGEST = 2**28


def write_index(folder: Path, index: Metadata) -> None:
    """Write the index that ``torch.distributed.checkpoint.save`` returned, for tensors alone."""
    listed = {}
    for name, tensor in index.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        shards = []
        for chunk in tensor.chunks:
            place = index.storage_data[MetadataIndex(name, chunk.offsets)]
            shards.append([chunk.offsets, chunk.sizes, place.relative_path, place.offset, place.length])
        listed[name] = {"dtype": str(tensor.properties.dtype), "size": tensor.size, "shards": shards}
    write_atomic(folder / INDEX, json.dumps(listed))


class ShardReader(FileSystemReader):
    """Reader of a checkpoint folder by its JSON index, which is read once.

    Raises:
        CorruptCheckpoint: there is no such index, it is damaged, or it does not fit the files.

    Source:
        ``torch.distributed.checkpoint.FileSystemReader``, which reads shards with ``weights_only=True``.
    """

    _known: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        if self._known is None:
            self._known = _read_index(Path(self.path))
        return self._known

    def list_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the size and dtype of each stored tensor, by name."""
        listed: Any = self.read_metadata().state_dict_metadata
        return listed


def _read_index(folder: Path) -> Metadata:
    path = folder / INDEX
    if not path.is_file():
        why = f"it has no {INDEX}: it is damaged, or was saved by an earlier version or another program"
        way_out = "Use an older one; if you trust it, convert it with torch.distributed.checkpoint.format_utils"
        raise CorruptCheckpoint(explain(f"{folder} cannot be read", why, way_out))
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    with as_corrupt(path):
        for name, entry in read_json(path, _LARGEST).items():
            chunks = []
            for offsets, sizes, file, start, length in entry["shards"]:
                chunks.append(ChunkStorageMetadata(_to_size(offsets), _to_size(sizes)))
                _to_size([start, length])  # natural numbers, as sizes are
                places[MetadataIndex(name, offsets)] = filesystem._StorageInfo(_to_file_name(file), start, length)
            size = _to_size(entry["size"])
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
                # Otherwise their values would be uninitialized memory.
                raise ValueError(f"shards of {name[:200]} are missing")
            tensors[name] = TensorStorageMetadata(TensorProperties(_DTYPES[entry["dtype"]]), size, chunks)
        _refuse_larger_than_files(path, tensors, places)
    return Metadata(tensors, None, places)


def _to_size(numbers: list[int]) -> torch.Size:
    if len(numbers) > MOST_AXES or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise TypeError("a size or an offset is not a list of natural numbers")
    return torch.Size(numbers)


def _to_file_name(name: str) -> str:
    if PurePath(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"it points out of its folder, to {name[:200]!r}")
    return name


def _refuse_larger_than_files(
    path: Path, tensors: dict[str, TensorStorageMetadata], places: dict[MetadataIndex, filesystem._StorageInfo]
) -> None:
    """Refuse an index whose tensors are larger than its files, before memory is allocated for them."""
    needed = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors.values())
    sizes: dict[str, int] = {}
    for name in {info.relative_path for info in places.values()}:
        file = path.parent / name
        if not file.is_file():
            raise CorruptCheckpoint(explain(f"{path} names {name[:200]}", "that file is missing", "Use an older one"))
        sizes[name] = file.stat().st_size
    beyond = [info for info in places.values() if info.offset + info.length > sizes[info.relative_path]]
    if needed > sum(sizes.values()) or beyond:
        why = f"its tensors need {needed} bytes, but its files have {sum(sizes.values())}"
        raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one"))


def fill_(reader: ShardReader, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors`` in place; a collective, unless ``alone``."""
    if tensors:
        alone = alone or not dist.is_initialized()
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # CheckpointException does not derive from Exception, so callers would not catch it.
        with silence_warning(alone), as_corrupt(reader.path, CheckpointException):
            dcp.load(in_chunks(tensors), storage_reader=reader, planner=planner, no_dist=alone)


@contextmanager
def silence_warning(alone: bool) -> Iterator[None]:
    """Suppress torch's warning that torch.distributed is disabled."""
    if not alone:  # warning filters belong to the whole process, and this may be a thread
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled.*")
        yield
