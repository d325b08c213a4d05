"""Checkpoints of ``torch.distributed.checkpoint``, read without trust: index and bytes of such are pickles."""

import collections
import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_fasttrain._checkpoint_folder import CorruptCheckpoint
from lightning_fasttrain._messages import explain

_NAMES = [
    *(
        (metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (filesystem, "_StorageInfo"),
    (collections, "OrderedDict"),
    (torch, "Size"),
    (pathlib, "PosixPath"),
]
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_KNOWN: dict[tuple[str, str], Any] = {
    **{(module.__name__, name): getattr(module, name) for module, name in _NAMES},
    **{("torch", name): value for name, value in _DTYPES.items()},
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _IndexUnpickler(pickle.Unpickler):
    """Knows the few classes of an index and nothing else: nothing that a file names is ever imported."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise CorruptCheckpoint(
                explain(
                    f"the checkpoint's index asks for {module}.{name}",
                    "that is no part of an index, and making it could run code",
                    "Do not load it; ask whoever made it for a file of safetensors",
                )
            ) from None


class SafeReader(FileSystemReader):
    """Reads a folder that this suite has written, as tensors and nothing else.

    Raises:
        CorruptCheckpoint: the index is damaged, or asks for more.

    Source:
        ``torch.distributed.checkpoint.FileSystemReader``, which unpickles whatever the index says.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                found: Any = _IndexUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, LookupError) as error:
                raise CorruptCheckpoint(explain(f"{path}", f"it is no index ({error})", "Use an older one")) from error
        if not isinstance(found, metadata.Metadata):
            raise CorruptCheckpoint(explain(f"{path}", f"it holds a {type(found).__name__}", "Use an older one"))
        for info in (found.storage_data or {}).values():
            if pathlib.PurePath(info.relative_path).name != info.relative_path:
                raise CorruptCheckpoint(
                    explain(f"{path}", f"it points out of its folder, to {info.relative_path!r}", "Use an older one")
                )
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class SafePlanner(DefaultLoadPlanner):
    """Reads plain values, should there be any beside the tensors, as ``weights_only``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
