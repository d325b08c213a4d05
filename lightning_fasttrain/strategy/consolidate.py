"""Consolidation of a sharded checkpoint: the plain model's weights in one safetensors file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST, verify_checkpoint
from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.files import as_corrupt, existing_path, write_atomic
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.strategy.zero.zero_files import ZeROFiles

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


def _zero_state(files: ZeROFiles) -> dict[str, Tensor]:
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
