"""Safe reader of ``torch.distributed.checkpoint`` folders, whose index and bytes are untrusted pickles."""

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_fasttrain.core.files.safe_load import MOST_AXES, CorruptCheckpoint, ForeignObjects
from lightning_fasttrain.core.messages import explain

_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_METADATA, _STORAGE = metadata.__name__, filesystem.__name__
_LARGEST = 2**28  # bytes of an index; ten thousand tensors on a hundred ranks need a tenth of that
# Opcodes that an index needs: numbers, strings, and lists, tuples and dicts of these. None of them looks up a name.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)


class _Named:
    """Placeholder for a class or function that a file refers to by name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Record:
    """Record of a call that a file would make: the name, the arguments, and the state to be set."""

    def __init__(self, name: str, given: tuple[Any, ...]) -> None:
        self.name, self.given, self.state = name, given, None


def _read_name(reader: Any) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    reader.append(_Named(_allowed_name(module, name)))


def _read_name_in_lines(reader: Any) -> None:
    module, name = reader.readline()[:-1].decode(), reader.readline()[:-1].decode()
    reader.append(_Named(_allowed_name(module, name)))


def _read_call(reader: Any) -> None:
    given, named = reader.stack.pop(), reader.stack.pop()
    if not isinstance(named, _Named) or not isinstance(given, tuple):
        raise TypeError("it calls an object without a name")
    reader.append(_Record(named.name, given))


def _read_state(reader: Any) -> None:
    state = reader.stack.pop()
    if not isinstance(reader.stack[-1], _Record) or reader.stack[-1].state is not None:
        raise TypeError("it sets the state of an object that has none")
    reader.stack[-1].state = state


# The Python unpickler: the C one has no dispatch table that could be replaced.
_python_unpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _PlainReader(_python_unpickler):
    """Unpickler that reads an index into plain data: it imports, creates and calls nothing."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code[0]: _python_unpickler.dispatch[code[0]] for code in _OPCODES},
        pickle.STACK_GLOBAL[0]: _read_name,
        pickle.GLOBAL[0]: _read_name_in_lines,
        pickle.NEWOBJ[0]: _read_call,
        pickle.REDUCE[0]: _read_call,
        pickle.BUILD[0]: _read_state,
    }


def _allowed_name(module: object, name: object) -> str:
    full = f"{module}.{name}"
    if full not in _MAKERS and full not in _DTYPES:
        why = "that does not belong to an index, and unpickling it could run code"
        way_out = "Do not load it; ask its author for a safetensors file"
        raise CorruptCheckpoint(explain(f"the checkpoint's index asks for {full[:200]}", why, way_out))
    return full


def _index(record: object) -> metadata.Metadata:
    """Build the index that plain data describe."""
    state = _state(record, f"{_METADATA}.Metadata")
    if not isinstance(state["state_dict_metadata"], dict) or not isinstance(state.get("storage_data"), dict):
        raise TypeError("it lists no tensors")
    listed = {_word(name): _make(entry) for name, entry in state["state_dict_metadata"].items()}
    stored = {_make(place): _make(info) for place, info in state["storage_data"].items()}
    return metadata.Metadata(listed, None, stored)


def _tensor(record: _Record) -> metadata.TensorStorageMetadata:
    state = _state(record)
    chunks = [_make(chunk) for chunk in state["chunks"]]
    if not all(isinstance(chunk, metadata.ChunkStorageMetadata) for chunk in chunks):
        raise TypeError("a tensor's chunks are not chunks")
    return metadata.TensorStorageMetadata(_make(state["properties"]), _make(state["size"]), chunks)


def _properties(record: _Record) -> metadata.TensorProperties:
    assert isinstance(record.state, tuple)
    return metadata.TensorProperties(dtype=_DTYPES[record.state[0].name])


def _chunk(record: _Record) -> metadata.ChunkStorageMetadata:
    state = _state(record)
    return metadata.ChunkStorageMetadata(_make(state["offsets"]), _make(state["sizes"]))


def _place(record: _Record) -> metadata.MetadataIndex:
    state = _state(record)
    offset, index = state.get("offset"), state.get("index")
    if not (index is None or type(index) is int):
        raise TypeError("the index of a chunk is not an integer")
    return metadata.MetadataIndex(_word(state["fqn"]), None if offset is None else _make(offset), index)


def _info(record: _Record) -> filesystem._StorageInfo:
    state = _state(record)
    path, offset, length = _word(state["relative_path"]), state["offset"], state["length"]
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise TypeError("the offset or length of a chunk is not a natural number")
    if state.get("transform_descriptors"):  # DCP can compress, and then file sizes give no limit
        raise TypeError("its data are compressed")
    if PurePath(path).name != path or path in ("", ".", ".."):
        why = f"it points out of its folder, to {path[:200]!r}"
        raise CorruptCheckpoint(explain("the checkpoint's index", why, "Use an older one"))
    return filesystem._StorageInfo(path, offset, length)


def _size(record: _Record) -> torch.Size:
    [numbers] = record.given
    if len(numbers) > MOST_AXES or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise TypeError("a tensor's size is not a list of natural numbers")
    return torch.Size(numbers)


def _bytes(record: _Record) -> metadata.BytesStorageMetadata:
    return metadata.BytesStorageMetadata()


# Entries of an index. A maker takes a record, checks its content, and builds the entry.
_MAKERS: dict[str, Callable[[Any], Any] | None] = {
    f"{_METADATA}.Metadata": _index,
    f"{_METADATA}.TensorStorageMetadata": _tensor,
    f"{_METADATA}.BytesStorageMetadata": _bytes,
    f"{_METADATA}.TensorProperties": _properties,
    f"{_METADATA}.ChunkStorageMetadata": _chunk,
    f"{_METADATA}.MetadataIndex": _place,
    f"{_STORAGE}._StorageInfo": _info,
    "torch.Size": _size,
    # Allowed, but not used:
    f"{_METADATA}.StorageMeta": None,
    f"{_METADATA}._MEM_FORMAT_ENCODING": None,
    "torch.serialization._get_layout": None,
    "pathlib.PosixPath": None,
    "pathlib._local.PosixPath": None,
}


def _make(record: object) -> Any:
    maker = _MAKERS.get(record.name) if isinstance(record, _Record) else None
    if maker is None:
        raise TypeError(f"expected an entry of an index, got {type(record).__name__}")
    return maker(record)


def _state(record: object, name: str | None = None) -> dict[str, Any]:
    if not isinstance(record, _Record) or not isinstance(record.state, dict) or name not in (None, record.name):
        raise TypeError("it is not an index")
    return record.state


def _word(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a name, got {type(value).__name__}")
    return value


class SafeReader(FileSystemReader):
    """Reader of a checkpoint folder that yields tensors only, and reads its index once.

    Raises:
        CorruptCheckpoint: the index is damaged, or refers to other objects.

    Source:
        ``torch.distributed.checkpoint.FileSystemReader``, which unpickles the index without restrictions.
    """

    _known: metadata.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        self._known = self._known or self._read_index(Path(self._get_metadata_path(kwargs.get("rank"))))
        self._known.storage_meta = metadata.StorageMeta(load_id=self.load_id)  # as FileSystemReader does
        return self._known

    def _read_index(self, path: Path) -> metadata.Metadata:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            raise CorruptCheckpoint(explain(f"{path}", "the index is missing or too large", "Use an older one"))
        try:
            found = _index(_PlainReader(io.BytesIO(path.read_bytes())).load())
        except CorruptCheckpoint:
            raise
        except Exception as error:  # an unpickler raises many kinds of errors for damaged files
            why = f"it is not an index ({type(error).__name__}: {str(error)[:200]})"
            raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one")) from error
        _refuse_larger_than_files(path, found)
        return found


def _refuse_larger_than_files(path: Path, index: metadata.Metadata) -> None:
    """Refuse an index whose tensors are larger than its files, before memory is allocated for them."""
    tensors = [t for t in index.state_dict_metadata.values() if isinstance(t, metadata.TensorStorageMetadata)]
    needed = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)
    names = {info.relative_path for info in index.storage_data.values()}
    sizes = {name: (path.parent / name).stat().st_size for name in names if (path.parent / name).is_file()}
    if len(sizes) < len(names):
        lost = sorted(names - set(sizes))[0]
        raise CorruptCheckpoint(explain(f"{path} names {lost[:200]}", "that file is missing", "Use an older one"))
    beyond = [i for i in index.storage_data.values() if i.offset + i.length > sizes[i.relative_path]]
    if needed > sum(sizes.values()) or beyond:
        why = f"its tensors need {needed} bytes, but its files have {sum(sizes.values())}"
        raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one"))


class SafePlanner(DefaultLoadPlanner):
    """Load planner that reads plain values with ``weights_only=True``."""

    def __init__(self, **options: Any) -> None:
        # Names are flat already, as save_sharded wrote them.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **options)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            why = f"it could only be made by running code from the file ({str(error)[:200]})"
            raise ForeignObjects(explain(f"{read_item.dest_index.fqn}", why, "Use an older one")) from error
