"""Checkpoints of a sharded model: every rank writes its shards; any number of ranks, or one, reads them."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.checkpoint_folder import agree_on_all_ranks, checkpoint_folder, verify_checkpoint
from lightning_fasttrain.core.files.run_mark import KEY, step_in
from lightning_fasttrain.core.files.safe_load import (
    CorruptCheckpoint,
    as_corrupt,
    local_path,
    read_archive,
    refuse_unreadable,
)
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.fsdp2._dcp_reading import SafePlanner, SafeReader
from lightning_fasttrain.strategy.fsdp2._sharded_optimizer import join, take_apart, template
from lightning_fasttrain.strategy.rank_health import RollCall

REST = "rest.pt"  # everything that is no tensor of the model or of an optimizer
_MODEL = "model."
NamesToLoad = Callable[[Mapping[str, Any], set[str], bool], set[str]]


def save_sharded(
    target: str | os.PathLike[str],
    model: Mapping[str, Any],
    optimizers: Mapping[str, Mapping[str, Any]] | None = None,
    rest: Mapping[str, Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint, all ranks together: into a folder aside, with checksums, that is renamed when complete.

    Args:
        target: the folder's name. One that exists is replaced.
        model: a ``state_dict``, sharded or not.
        optimizers: name → :func:`named_state` of an optimizer.
        rest: plain values: numbers, strings, tensors, and lists and dicts of these.
        group: processes that write, if not all; on a group of their own they may do so in the background.

    Raises:
        ValueError: the rest holds something that could not be read back; names it.
        OSError: a rank could not write. An older folder of this name is as it was.

    Example:
        >>> folder = getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, nn.Linear(2, 1).state_dict(), rest={"step": 1})
        >>> sorted(full_state_dict(folder))
        ['bias', 'weight']

    Source:
        ``torch.distributed.checkpoint``.
    """
    alone = not dist.is_initialized()
    tensors = {f"{_MODEL}{name}": value for name, value in model.items() if isinstance(value, Tensor)}
    plain: dict[str, Any] = {"version": 1, "rest": dict(rest or {}), "optimizers": {}}
    plain["values"] = {name: value for name, value in model.items() if not isinstance(value, Tensor)}
    for key, state in (optimizers or {}).items():
        parts, plain["optimizers"][key] = take_apart(state)
        tensors.update({f"{key}.{name}": value for name, value in parts.items()})
    rank, world_size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    # In the background no collective of the default group may be called.
    agree = agree_on_all_ranks if group is None else RollCall(group)
    about = {"format": "fsdp2", **plain["rest"].get(KEY, {"step": step_in(plain["rest"])})}
    with checkpoint_folder(target, rank=rank, world_size=world_size, agree=agree, about=about) as folder:
        refuse_unreadable(plain)  # here, so that all ranks hear of it
        writer = dcp.FileSystemWriter(folder, sync_files=False, overwrite=True)  # the folder's own leaving syncs
        # Nothing is flattened, as in SafePlanner, which reads it.
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _silence_warning(alone), _errors_of_ranks():
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
        if rank == 0:
            write_atomic(folder / REST, lambda file: torch.save(plain, file))


def load_sharded_(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer] | None = None,
    *,
    strict: bool = True,
    names: NamesToLoad | None = None,
) -> dict[str, Any]:
    """Load what :func:`save_sharded` wrote, onto any number of ranks, all together; each reads what it needs.

    Args:
        folder: a complete checkpoint; :func:`~lightning_fasttrain.run.verify_checkpoint` is the caller's business.
        model: sharded on any mesh, or plain.
        optimizers: by the names they were saved under. One that was not saved is left as it is.
        strict: whether names must agree.
        names: the rest, the names that were saved, and ``strict`` → the names to load; by default all of the model's.

    Returns:
        The rest.

    Raises:
        ValueError: names or optimizers differ; says which.
        CorruptCheckpoint: the index asks for something else than tensors.

    Example:
        >>> net, folder = nn.Linear(2, 1), getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, {name: tensor + 1 for name, tensor in net.state_dict().items()}, rest={"step": 1})
        >>> before = net.weight.detach().clone()
        >>> load_sharded_(folder, net), torch.equal(net.weight, before + 1)
        ({'step': 1}, True)
    """
    plain = _read_rest(folder)
    reader = SafeReader(folder)
    index, state = reader.read_metadata(), model.state_dict()
    saved = {name.removeprefix(_MODEL) for name in index.state_dict_metadata if name.startswith(_MODEL)}
    expected = set(state) if names is None else names(plain["rest"], saved | set(plain["values"]), strict)
    wanted = {name: value for name, value in state.items() if name in expected and isinstance(value, Tensor)}
    refuse_other_names(set(wanted), saved, folder, strict)
    wanted = {name: value for name, value in wanted.items() if name in saved}
    _refuse_other_shapes(wanted, index, folder)
    _read(reader, {f"{_MODEL}{name}": value.detach() for name, value in wanted.items()})
    # The tensors are filled in place already: this lets the modules' own hooks act, and names were compared above.
    model.load_state_dict({**state, **wanted, **plain["values"]}, strict=False)
    for key, optimizer in (optimizers or {}).items():
        if key in plain["optimizers"]:
            _load_optimizer_(reader, key, plain["optimizers"][key], model, optimizer)
    return plain["rest"]


def _load_optimizer_(
    reader: SafeReader, key: str, plain: dict[str, Any], model: nn.Module, optimizer: Optimizer
) -> None:
    # Tied weights: state may be under any of their names.
    index, parameters = reader.read_metadata(), dict(model.named_parameters(remove_duplicate=False))
    tensors = {}
    for name, layout in plain["layout"].items():
        stored = index.state_dict_metadata.get(f"{key}.{name}")
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptCheckpoint(explain(f"{reader.path}", f"it lacks {name[:200]} of {key}", "Use an older one"))
        parameter = parameters.get(name.rpartition("/")[0])
        tensors[name] = template(stored.size, stored.properties.dtype, layout, parameter)
    _read(reader, {f"{key}.{name}": tensor for name, tensor in tensors.items()})
    join(plain, tensors, model, optimizer)


def load_full_(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer] | None = None,
    *,
    strict: bool,
    names: NamesToLoad | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in one file, of Lightning on one device or with DDP, into a sharded model: each rank its part.

    Args:
        path: a file.
        model: sharded, or plain.
        optimizers: in the order they were saved in.
        strict: whether names must agree.
        names: as for :func:`load_sharded_`.

    Returns:
        The checkpoint, without the state of model and optimizers.

    Example:
        >>> net, path = nn.Linear(2, 1), getfixture("tmp_path") / "one.ckpt"
        >>> torch.save({"state_dict": net.state_dict(), "epoch": 1}, path)
        >>> load_full_(path, nn.Linear(2, 1), strict=True)
        {'epoch': 1}
    """
    checkpoint: Any = read_archive(path, mmap=True)  # mmap: a rank reads the pages of its own parts
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        why = "there is no state_dict in it, so it is no checkpoint of a run"
        raise ValueError(explain(f"{path}", why, "Load it with load_state_dict before the run"))
    state, full = model.state_dict(), checkpoint.pop("state_dict")
    expected = set(state) if names is None else names(checkpoint, set(full), strict)
    refuse_other_names(expected, set(full), path, strict)
    parts = {name: _part(full[name], value) for name, value in state.items() if name in full}
    model.load_state_dict({**state, **parts}, strict=False)
    states = checkpoint.pop("optimizer_states", [])
    for optimizer, saved in zip((optimizers or {}).values(), states, strict=False):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in saved["state"].items():
            like = held[number]
            # Cut like the parameter; what has another shape, as a count, is whole.
            values.update({k: _part(v, like) for k, v in values.items() if getattr(v, "shape", None) == like.shape})
        optimizer.load_state_dict(saved)
    return checkpoint


def _part(full: Any, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return full
    on_mesh = full.to(like.device_mesh.device_type)
    # None: each rank has the whole and takes its part, nothing is sent.
    return distribute_tensor(on_mesh, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def full_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The whole model of a sharded checkpoint, in a plain process and in host memory; keys are the plain model's.

    Args:
        folder: a checkpoint; it is verified.

    Returns:
        Name → tensor, for ``model.load_state_dict`` or ``safetensors.torch.save_file``. Tied weights come under each
        of their names, in memory of their own.

    Raises:
        CorruptCheckpoint: the folder is not as it was written.

    Example:
        >>> folder = getfixture("tmp_path") / "step-1"
        >>> save_sharded(folder, nn.Linear(2, 1).state_dict())
        >>> full_state_dict(folder)["weight"].shape
        torch.Size([1, 2])
    """
    verify_checkpoint(folder)
    return _read_whole(folder, _MODEL)


def full_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A sharded checkpoint of the Trainer in the form of one file: ``torch.save`` it, and resume on one device.

    Args:
        folder: a checkpoint; it is verified.

    Returns:
        What Lightning's own checkpoint of the run would hold, optimizer state included.

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
        tensors = _read_whole(folder, f"{key}.")
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        values: dict[int, dict[str, Any]] = {}
        for path, value in {**state["values"], **tensors}.items():
            name, _, entry = path.rpartition("/")
            values.setdefault(numbers[name], {})[entry] = value
        groups = []
        for group in state["param_groups"]:
            groups.append({**group, "params": [numbers[name] for name in group["params"]]})
        states.append({"state": values, "param_groups": groups})
    return {
        **plain["rest"],
        "state_dict": {**_read_whole(folder, _MODEL), **plain["values"]},
        **({"optimizer_states": states} if states else {}),
    }


def _read_whole(folder: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    reader = SafeReader(folder)
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }
    _read(reader, tensors, alone=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _read(reader: SafeReader, tensors: dict[str, Any], *, alone: bool = False) -> None:
    """Fill ``tensors`` in place. All ranks, unless ``alone``."""
    if tensors:
        alone = alone or not dist.is_initialized()
        # CheckpointException is no Exception, so others would not catch it.
        with _silence_warning(alone), as_corrupt(reader.path, CheckpointException):
            dcp.load(tensors, storage_reader=reader, planner=SafePlanner(), no_dist=alone)


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """What went wrong on any rank, as an error that a program can catch: torch's own is no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()]
        raise OSError("; ".join(reasons)) from error


@contextmanager
def _silence_warning(alone: bool) -> Iterator[None]:
    """Without torch's warning that one process is alone."""
    if not alone:  # filters belong to the whole process, and this may be a thread
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled.*")
        yield


def _read_rest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = local_path(folder) / REST
    plain = read_archive(path)
    if not _is_rest(plain):
        raise CorruptCheckpoint(explain(f"{path}", "it is not what save_sharded writes", "Use an older one"))
    return plain


def _is_rest(plain: object) -> bool:
    """Whether this is what :func:`save_sharded` writes beside the tensors."""
    parts = ("rest", "optimizers", "values")
    if not isinstance(plain, dict) or not all(isinstance(plain.get(part), dict) for part in parts):
        return False
    return all(map(_is_taken_apart, plain["optimizers"].values()))


def _is_taken_apart(state: object) -> bool:
    """Whether this is the plain part of an optimizer, as :func:`take_apart` makes it."""
    kinds = {"class": str, "param_groups": list, "layout": dict, "values": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(part), kind) for part, kind in kinds.items()):
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in state["param_groups"])


def _refuse_other_shapes(wanted: Mapping[str, Tensor], index: Metadata, folder: str | os.PathLike[str]) -> None:
    for name, value in wanted.items():
        stored = index.state_dict_metadata[f"{_MODEL}{name}"]
        size = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "no tensor"
        if size != list(value.shape):
            why = f"{name} is {size} in it, and here {list(value.shape)}"
            raise ValueError(explain(f"{folder} is of another model", why, "Build the model as it was"))


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
