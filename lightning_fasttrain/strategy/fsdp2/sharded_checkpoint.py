"""Checkpoints of a sharded model: every rank writes its shards, and any number of ranks reads them.

The index of a checkpoint, which says what file holds which shard, is JSON. ``torch.distributed.checkpoint`` pickles its
own index, and unpickling a file can run any code in it. That index stays in the folder for torch's tools, and is never
read here.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import Optimizer

from lightning_fasttrain.checkpoint.checkpoint_folder import verify_checkpoint
from lightning_fasttrain.checkpoint.newest_checkpoint import KEY, step_in
from lightning_fasttrain.checkpoint.remote_checkpoint import folder_to_write
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import ControlGroup, all_ranks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.safe_load import (
    MOST_AXES,
    CorruptCheckpoint,
    as_corrupt,
    local_path,
    read_archive,
    read_json,
    refuse_unreadable,
)
from lightning_fasttrain.core.state.values import find_by_parameter, only, replace_at, split_tensors
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import (
    is_taken_apart,
    join,
    join_averages,
    separate_averages,
    take_apart,
    template,
    with_numbers,
)
from lightning_fasttrain.strategy.tensor_parallel.layouts import in_chunks, shard_like

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


REST = "rest.pt"  # everything except the tensors of the model and of the optimizers
_MODEL = "model."
_AVERAGES = "averages"  # what callbacks keep for parameters
NamesToLoad = Callable[[Mapping[str, Any], set[str], bool], set[str]]


@check_arguments
def save_sharded(
    target: str | os.PathLike[str],
    model: Mapping[str, object],
    optimizers: Mapping[str, Mapping[str, object]] | None = None,
    rest: Mapping[str, object] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a sharded checkpoint; a collective. The folder is checksummed, and renamed to ``target`` when complete.

    It has the layout of ``torch.distributed.checkpoint``, and an index of its own, as JSON, by which it is read.

    Args:
        target: path of the folder, or its address in object storage. An existing one is replaced. For object storage
            each rank writes its shards to the system's temporary folder and uploads them; the manifest is written last.
        model: a ``state_dict``, sharded or not.
        optimizers: name → :func:`named_state` of an optimizer.
        rest: plain values: numbers, strings, tensors, and lists and dicts of these. A dict under a key
            ``"by_parameter"``, of a parameter's name → tensor, is sharded like the parameters.
        group: process group that writes, by default the default group; with a separate group, saving may run in the
            background.

    Raises:
        ValueError: ``rest`` holds a value that could not be read back; names it.
        OSError: a rank could not write. An older folder of this name is not changed.

    Example:
        >>> folder = getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, nn.Linear(2, 1).state_dict(), rest={"step": 1})
        >>> sorted(full_state_dict(folder))
        ['bias', 'weight']

    Source:
        ``torch.distributed.checkpoint``.
    """
    alone = not dist.is_initialized()
    plain: dict[str, Any] = {"version": 1, "optimizers": {}}
    weights, plain["values"] = split_tensors(model)
    plain["rest"], averages, plain[_AVERAGES] = separate_averages(dict(rest or {}))
    tensors = {**_with_prefix(_MODEL, weights), **_with_prefix(f"{_AVERAGES}.", averages)}
    for key, state in (optimizers or {}).items():
        parts, plain["optimizers"][key] = take_apart(state)
        tensors.update(_with_prefix(f"{key}.", parts))
    # A background save must not call collectives of the default group.
    ranks = ControlGroup(group) if group is not None else all_ranks()
    about = {"format": "fsdp2", **plain["rest"].get(KEY, {"step": step_in(plain["rest"])})}
    with folder_to_write(target, ranks=ranks, about=about) as folder:
        # In this context, so that an error reaches all ranks.
        refuse_unreadable(plain)
        writer = dcp.FileSystemWriter(folder, sync_files=False, overwrite=True)  # checkpoint_folder syncs on exit
        # No flattening: names are flat already.
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with silence_warning(alone), _errors_of_ranks():
            chunks = in_chunks(tensors)
            index = dcp.save(chunks, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
        if ranks.rank == 0:
            write_index(folder, index)
            write_atomic(folder / REST, lambda file: torch.save(plain, file))


@check_arguments
def load_sharded_(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer] | None = None,
    *,
    strict: bool = True,
    names: NamesToLoad | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_sharded` on any number of ranks; a collective. Each rank reads its shards.

    Args:
        folder: a complete checkpoint, verified by the caller with
            :func:`~lightning_fasttrain.checkpoint.verify_checkpoint`.
        model: the model, sharded on any mesh, or unsharded.
        optimizers: the optimizers, by the names they were saved under. One that was not saved is not changed.
        strict: whether names must match.
        names: function of the rest, the saved names and ``strict`` that returns the names to load; by default all of
            the model's.

    Returns:
        The rest: the plain values that were saved.

    Raises:
        ValueError: names or optimizers differ; says which.
        CorruptCheckpoint: the index is missing or damaged.

    Example:
        >>> net, folder = nn.Linear(2, 1), getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, {name: tensor + 1 for name, tensor in net.state_dict().items()}, rest={"step": 1})
        >>> before = net.weight.detach().clone()
        >>> load_sharded_(folder, net), torch.equal(net.weight, before + 1)
        ({'step': 1}, True)
    """
    plain, reader = _read_rest(folder), ShardReader(folder)
    stored, state = reader.list_tensors(), model.state_dict()
    saved = {name.removeprefix(_MODEL) for name in stored if name.startswith(_MODEL)}
    expected = set(state) if names is None else names(plain["rest"], saved | set(plain["values"]), strict)
    wanted, _ = split_tensors(only(state, expected))
    refuse_other_names(set(wanted), saved, folder, strict)
    wanted = only(wanted, saved)
    for name, value in wanted.items():
        size = stored[f"{_MODEL}{name}"].size
        if size != value.shape:
            why = f"{name} has shape {list(size)} in it, and {list(value.shape)} in this model"
            raise ValueError(explain(f"{folder} is of another model", why, "Build the model with the same shapes"))
    fill_(reader, {f"{_MODEL}{name}": value.detach() for name, value in wanted.items()})
    # The tensors are filled in place already: this runs the modules' load hooks. Names were compared above.
    model.load_state_dict({**state, **wanted, **plain["values"]}, strict=False)
    for key, optimizer in (optimizers or {}).items():
        if key in plain["optimizers"]:
            taken = plain["optimizers"][key]
            join(taken, _read_like_parameters(reader, key, taken, model), model, optimizer, folder)
    return _rest_with_averages(plain, reader, model)


def _read_like_parameters(
    reader: ShardReader, key: str, taken: Mapping[str, object], model: nn.Module | None
) -> dict[str, Tensor]:
    """Read tensors whose names begin with a parameter's, in its current layout; without a model, unsharded."""
    # The state of tied weights may be stored under any of their names.
    parameters = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    listed, tensors = reader.list_tensors(), {}
    for name, layout in taken["layout"].items():
        stored = listed.get(f"{key}.{name}")
        if stored is None:
            raise CorruptCheckpoint(explain(f"{reader.path}", f"it lacks {name[:200]} of {key}", "Use an older one"))
        parameter = parameters.get(name.rpartition("/")[0])
        tensors[name] = template(stored.size, stored.properties.dtype, layout, parameter)
    fill_(reader, _with_prefix(f"{key}.", tensors), alone=model is None)
    return tensors


def _rest_with_averages(plain: dict[str, Any], reader: ShardReader, model: nn.Module | None) -> dict[str, Any]:
    taken = plain.get(_AVERAGES)
    if taken is None:  # checkpoints of earlier versions
        return plain["rest"]
    with as_corrupt(reader.path):
        tensors = _read_like_parameters(reader, _AVERAGES, taken, model)
        return join_averages(plain["rest"], taken, tensors)


def load_full_(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer] | None = None,
    *,
    strict: bool,
    names: NamesToLoad | None = None,
) -> dict[str, Any]:
    """Load a checkpoint file that Lightning wrote on one device or with DDP into a sharded model.

    Args:
        path: the file.
        model: the model, sharded or not.
        optimizers: the optimizers, in the order they were saved in.
        strict: whether names must match.
        names: as for :func:`load_sharded_`.

    Returns:
        The checkpoint, without the states of model and optimizers.

    Example:
        >>> net, path = nn.Linear(2, 1), getfixture("tmp_path") / "one.ckpt"
        >>> torch.save({"state_dict": net.state_dict(), "epoch": 1}, path)
        >>> load_full_(path, nn.Linear(2, 1), strict=True)
        {'epoch': 1}
    """
    checkpoint: Any = read_archive(path, mmap=True)  # mmap: a rank reads the pages of its own shards
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        why = "it contains no state_dict, so it is not a checkpoint of a run"
        raise ValueError(explain(f"{path}", why, "Load it with load_state_dict before the run"))
    state, full = model.state_dict(), checkpoint.pop("state_dict")
    expected = set(state) if names is None else names(checkpoint, set(full), strict)
    refuse_other_names(expected, set(full), path, strict)
    parts = {name: shard_like(full[name], value) for name, value in state.items() if name in full}
    model.load_state_dict({**state, **parts}, strict=False)
    states = checkpoint.pop("optimizer_states", [])
    for optimizer, saved in zip((optimizers or {}).values(), states, strict=False):
        held = parameters_of(optimizer)
        for number, values in saved["state"].items():
            like = held[number]
            # Sharded like the parameter; state of another shape, such as a step counter, is replicated.
            for key, value in values.items():
                if getattr(value, "shape", None) == like.shape:
                    values[key] = shard_like(value, like)
        optimizer.load_state_dict(saved)
    for keys, values in find_by_parameter(checkpoint):
        named = dict(model.named_parameters(remove_duplicate=False))
        checkpoint = replace_at(checkpoint, keys, {k: shard_like(v, named.get(k)) for k, v in values.items()})
    return checkpoint


@check_arguments
def full_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the unsharded ``state_dict`` of a sharded checkpoint, in a single process and in host memory.

    Args:
        folder: a checkpoint; it is verified.

    Returns:
        Name → tensor with the unsharded model's keys, for ``model.load_state_dict`` or
        ``safetensors.torch.save_file``. Tied weights are stored under each of their names, in separate memory.

    Raises:
        CorruptCheckpoint: the folder has changed since it was written.

    Example:
        >>> folder = getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, nn.Linear(2, 1).state_dict())
        >>> full_state_dict(folder)["weight"].shape
        torch.Size([1, 2])
    """
    verify_checkpoint(folder)
    return _read_whole(folder, _MODEL)


@check_arguments
def full_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a sharded checkpoint of the Trainer as one dict: ``torch.save`` it, and resume on one device.

    Args:
        folder: a checkpoint; it is verified.

    Returns:
        The content of Lightning's own checkpoint of the run, optimizer state included.

    Example:
        >>> folder = getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, nn.Linear(2, 1).state_dict(), rest={"epoch": 1})
        >>> sorted(full_checkpoint(folder))
        ['epoch', 'state_dict']
    """
    verify_checkpoint(folder)
    plain = _read_rest(folder)
    states = []
    for key, state in plain["optimizers"].items():
        with as_corrupt(folder):
            states.append(with_numbers(state, _read_whole(folder, f"{key}.")))
    checkpoint = _rest_with_averages(plain, ShardReader(folder), None)
    checkpoint["state_dict"] = {**_read_whole(folder, _MODEL), **plain["values"]}
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _read_whole(folder: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    reader, tensors = ShardReader(folder), {}
    for name, stored in reader.list_tensors().items():
        if name.startswith(prefix):
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    fill_(reader, tensors, alone=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Convert torch's ``CheckpointException``, which does not derive from ``Exception``, to an ``OSError``."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()]
        raise OSError("; ".join(reasons)) from error


def _read_rest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = local_path(folder) / REST
    plain = read_archive(path)
    if not _is_rest(plain):
        raise CorruptCheckpoint(explain(f"{path}", "it was not written by save_sharded", "Use an older one"))
    return plain


def _is_rest(plain: object) -> bool:
    """Return whether this is the plain part of a checkpoint, as :func:`save_sharded` writes it."""
    parts = ("rest", "optimizers", "values")
    if not isinstance(plain, dict) or not all(isinstance(plain.get(part), dict) for part in parts):
        return False
    return all(map(is_taken_apart, plain["optimizers"].values()))


def refuse_other_names(mine: set[str], saved: set[str], path: str | os.PathLike[str], strict: bool) -> None:
    """Refuse a checkpoint of another model."""
    if not strict or mine == saved:
        return
    reasons = []
    for what, names in (("it lacks", sorted(mine - saved)), ("the model lacks", sorted(saved - mine))):
        if names:
            more = " …" if len(names) > 4 else ""
            reasons.append(f"{what} {', '.join(names[:4])}{more}")
    way_out = "Build the model as it was when it was saved, or set strict_loading=False"
    raise ValueError(explain(f"{path} is of another model", "; ".join(reasons), way_out))
