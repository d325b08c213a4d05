"""Reader of DeepSpeed's checkpoint files that needs no DeepSpeed and runs no code from the files."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.files import CorruptCheckpoint, as_corrupt, local_path, refuse_unfit
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.values import without


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
