"""Consolidation of a sharded checkpoint: the plain model's weights in one safetensors file."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST, verify_checkpoint
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.core.safe_load import CorruptCheckpoint, as_corrupt, existing_path, local_path, refuse_unfit
from lightning_fasttrain.core.state.values import without

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Consolidated:
    """Summary of a written safetensors file.

    Args:
        path: the safetensors file.
        tensors: number of tensors; tied ones are stored under each of their names.
        numel: number of elements, tied ones counted once.
        nbytes: bytes of all tensors.
        source: the checkpoint's kind, such as ``"ZeRO stage 3, 2 ranks"``.
    """

    path: Path
    tensors: int
    numel: int
    nbytes: int
    source: str


@check_arguments
def consolidate(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Consolidated:
    """Write the unsharded float32 weights of a sharded checkpoint to one file, which loads without DeepSpeed.

    The file has the keys of the plain model, for ``model.load_state_dict(safetensors.torch.load_file(out))``. Weights
    come from the optimizer's float32 master weights. Frozen parameters and buffers are included, 16-bit ones as
    float32, and quantised ones as they are stored. One process without DeepSpeed is enough, and no code from the
    checkpoint is run: objects that are not tensors are left out.

    Args:
        folder: checkpoint written under :class:`~lightning_fasttrain.ZeROStrategy` (stage 0 to 3, any number of
            processes), Lightning's own DeepSpeed strategies, or :class:`~lightning_fasttrain.FSDP2Strategy`.
        out: file to write, ``*.safetensors``; an existing file is replaced when the new one is complete.

    Returns:
        The path, and a summary of the file.

    Raises:
        CorruptCheckpoint: the checkpoint is truncated, changed, or mixes files of several checkpoints.
        FileNotFoundError: ``folder`` does not exist.
        ValueError: ``folder`` is not a sharded checkpoint, or ``out`` has another ending.

    Example:
        >>> from lightning_fasttrain.strategy import save_sharded
        >>> folder = getfixture("tmp_path")
        >>> save_sharded(folder / "step-1", {"weight": torch.ones(2, 3)})
        >>> consolidate(folder / "step-1", folder / "weights.safetensors").numel
        6
    """
    folder, out = existing_path(folder), Path(out)
    if out.suffix != ".safetensors":
        why = "the file has the format of safetensors, and other programs choose their reader by the ending"
        raise ValueError(explain(f"out={str(out)!r}", why, f"Use {str(out.with_suffix('.safetensors'))!r}"))
    state, source = _state_of(folder)
    if not state:
        why = "it contains no model"
        raise ValueError(explain(f"{folder}", why, "Give the folder that the run has saved, not a subfolder"))
    save: Any = require("safetensors.torch", extra="finetune").save
    whole = _untie(state)
    write_atomic(out, lambda file: file.write(save(whole, metadata={"format": "pt"})))
    # Tied names share memory here, so an address counts once.
    once = {tensor.data_ptr(): tensor for tensor in state.values()}
    numel = sum(map(Tensor.numel, once.values()))
    return Consolidated(out, len(whole), numel, bytes_of(whole.values()), source)


def _state_of(folder: Path) -> tuple[dict[str, Tensor], str]:
    if (folder / ".metadata").exists() or any(folder.glob("*/.metadata")):
        from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import full_state_dict

        state = full_state_dict(folder)  # which verifies the folder
        return {name: _as_float32(tensor) for name, tensor in state.items()}, "FSDP2"
    # Checkpoints of Lightning's own DeepSpeed strategies have none.
    if (folder / MANIFEST).exists():
        verify_checkpoint(folder)
    inner = _deepspeed_files(folder)
    if inner is None:
        why = "not a sharded checkpoint: it contains neither DeepSpeed's files nor torch.distributed's .metadata"
        way_out = "Give the folder that the run has saved, such as epoch=0-step=100.ckpt"
        raise ValueError(explain(f"{folder}", why, way_out))
    files = ZeROFiles.read(inner)
    ranks = ""
    if files.shards:
        ranks = f", {len(files.shards)} ranks"
    with as_corrupt(folder):
        return _zero_state(files), f"ZeRO stage {files.stage}{ranks}"


def _deepspeed_files(folder: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: the tag's folder named in ``latest``, or ``folder`` itself."""
    latest = folder / "latest"
    candidates = [folder / "checkpoint", folder]
    # The file holds one name, so a longer one is something else.
    if latest.is_file() and latest.stat().st_size < 1000:
        tag = latest.read_text().strip()
        if tag == Path(tag).name:  # a name from a file must not lead elsewhere
            candidates.insert(0, folder / tag)
    return next((path for path in candidates if any(path.glob("*_model_states.pt"))), None)


def _zero_state(files: "ZeROFiles") -> dict[str, Tensor]:
    module = files.model.get("module")
    if not isinstance(module, dict):
        raise TypeError("it contains no module")
    masters, frozen, tied = dict(files.masters()), dict(files.read_frozen()), files.read_ties()
    state: dict[str, Tensor] = {}
    for name, value in module.items():  # the model's own order
        source = tied.get(name, name)
        # The float32 copy first: the module has the rounded values.
        found = masters.get(source, frozen.get(source, value))
        if isinstance(found, Tensor):
            state[name] = _as_float32(found)
    for name in (*masters, *frozen):
        if name not in state:  # a checkpoint's module can lack frozen parameters
            state[name] = _as_float32(masters.get(name, frozen.get(name)))  # type: ignore[arg-type]
    for name, source in tied.items():
        if source in state:
            state[name] = state[source]
    return state


def _as_float32(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise TypeError("a tensor has no values")
    if tensor.dtype in _LOW:
        return tensor.float()
    return tensor


def _untie(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that do not share memory, as safetensors requires."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in state.items():
        tensor = tensor.contiguous()
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and (address in seen or tensor.untyped_storage().nbytes() != tensor.nbytes):
            tensor = tensor.clone()
        whole[name] = tensor
        seen.add(address)
    return whole


class Inert(dict):
    """Placeholder for any class in a file: it stores its arguments, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


def read_inert(path: Path) -> dict[str, Any]:
    """Load a file of ``torch.save`` with :class:`Inert` objects in place of classes that are not torch's own."""
    path = local_path(path)
    refuse_unfit(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stubs: Any = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # Damaged or hostile files raise many kinds of errors.
        # All of the message: its first line says nothing of the class that is refused.
        why = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(explain(f"{path} cannot be read", why, "Use another checkpoint")) from error


@dataclass
class ZeROFiles:
    """Files of one DeepSpeed checkpoint: the model states, and all ranks' shards of the optimizer state.

    Args:
        stage: ZeRO stage, 0 to 3.
        model: model states of the first or only rank.
        models: model states of each rank at stage 3.
        shards: shard of the optimizer state of each rank; empty at stage 0.
    """

    stage: int
    model: dict[str, Any]
    models: list[dict[str, Any]]
    shards: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "ZeROFiles":
        """Read a folder that holds DeepSpeed's files.

        Raises:
            CorruptCheckpoint: files are missing, belong to another checkpoint, or cannot be read.
        """
        # Sorted by number: as strings, 10 comes before 2.
        by_rank = sorted(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=_rank)
        whole = folder / "mp_rank_00_model_states.pt"
        others = [path.name for path in folder.glob("mp_rank_*_model_states.pt") if path != whole]
        if others:
            why = "it is sharded by tensor parallelism too"
            raise ValueError(explain(f"{folder} holds {others[0]}", why, "Use DeepSpeed's tools"))
        if not whole.exists() and not by_rank:
            raise CorruptCheckpoint(explain(f"{folder}", "it contains no *_model_states.pt", "Check the path"))
        of_models = [whole] if whole.exists() else by_rank
        with as_corrupt(folder):
            models = list(map(read_inert, of_models))
            paths = sorted(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"), key=_rank)
            shards = [read_inert(path)["optimizer_state_dict"] for path in paths]
            stage = _stage(shards)
            counts = {_largest_count(shard["partition_count"]) for shard in shards}
        expected = counts.pop() if len(counts) == 1 else None
        if shards and (expected != len(shards) or (stage == 3 and len(models) != expected)):
            why = f"it was saved by {expected}, or in part by an earlier run"
            way_out = "Use another checkpoint"
            raise CorruptCheckpoint(explain(f"{folder} holds the shards of {len(shards)} ranks", why, way_out))
        return cls(stage, models[0], models, shards)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the float32 master weight of each parameter, joined from all ranks."""
        if self.stage == 0:
            yield from _masters_of_stage_0(self.model, self.read_ties())
        elif self.stage == 3:
            yield from self._of_stage_3()
        else:
            yield from self._of_stage_1_and_2()

    def _of_stage_1_and_2(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights of stages 1 and 2, where each group is flattened and then sharded."""
        paddings = self.shards[0].get("param_alignment_paddings")
        for i, shapes in enumerate(self.model["param_shapes"]):
            flat = torch.cat([shard["single_partition_of_fp32_groups"][i] for shard in self.shards])
            padding = paddings[i] if paddings else [0] * len(shapes)
            start = 0
            for (name, shape), unused in zip(shapes.items(), padding, strict=True):
                size = math.prod(shape)
                yield name, _slice(flat, start, size, name).view(tuple(shape))
                start += size + unused

    def _of_stage_3(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights of stage 3, where each parameter is sharded equally over all ranks, with padding."""
        by_rank = []
        # A parameter may begin in one group of a rank and end in the next.
        for shard in self.shards:
            by_rank.append(torch.cat([group.flatten() for group in shard["fp32_flat_groups"]]))
        start = 0
        for shapes in self.model["param_shapes"]:
            for name, shape in shapes.items():
                size = math.prod(shape)
                cut = math.ceil(size / len(by_rank))
                whole = torch.cat([_slice(flat, start, cut, name) for flat in by_rank])
                start += cut
                yield name, _slice(whole, 0, size, name).view(tuple(shape))

    def read_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of each frozen parameter at stage 3; below it the module contains them."""
        if self.stage < 3:
            return
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            whole = torch.cat([model["frozen_param_fragments"][name].flatten() for model in self.models])
            yield name, _slice(whole, 0, math.prod(shape), name).view(tuple(shape))

    def read_ties(self) -> Mapping[str, str]:
        """Map the name of each tied parameter to the name it is saved under."""
        if self.stage > 0:
            return dict(self.model.get("shared_params") or {})
        # Stage 0 records no names, but tied tensors share memory in the file too.
        first: dict[Any, str] = {}
        # A view and its base share an address, but not shape and strides.
        keys = {n: (v.data_ptr(), v.shape, v.stride()) for n, v in self.model["module"].items() if v.numel()}
        return {name: first[key] for name, key in keys.items() if first.setdefault(key, name) != name}


def _masters_of_stage_0(model: dict[str, Any], tied: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the master weights of stage 0, stored without names and identified by their rounded values."""
    optimizer = model.get("optimizer") or {}
    groups = optimizer.get("fp32_groups") or []
    names = without(model["module"], tied)
    for master in chain.from_iterable(groups):
        for name, value in names.items():
            # Cast to the module's dtype, as the optimizer does.
            if value.shape == master.shape and torch.equal(master.to(value.dtype), value):
                yield name, master
                del names[name]
                break


def _slice(flat: Tensor, start: int, size: int, name: str) -> Tensor:
    if start + size > flat.numel():
        why = f"the ranks' shards hold {flat.numel()} of {start + size} values"
        raise ValueError(f"{name} is incomplete: {why}")
    return flat[start : start + size]


def _stage(shards: list[dict[str, Any]]) -> int:
    if not shards:
        return 0
    stage = shards[0]["zero_stage"]
    if isinstance(stage, Inert):
        stage = stage.args[0]
    return int(stage)


def _largest_count(count: int | list[int]) -> int:
    return max(count) if isinstance(count, list) else int(count)


def _rank(path: Path) -> int:
    return int(path.name.partition("pp_rank_")[2].partition("_")[0])
