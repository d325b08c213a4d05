"""Checkpoints of DeepSpeed engines: written atomically with checksums, and inspected before they are unpickled."""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.checkpoint.checkpoint_folder import (
    MANIFEST,
    read_manifest,
    scratch_folder,
)
from lightning_fasttrain.checkpoint.newest_checkpoint import mark_of, whole_or_older
from lightning_fasttrain.checkpoint.remote_checkpoint import fetched_on_each_node, folder_to_write
from lightning_fasttrain.core.distributed import all_ranks, from_first_of_node, from_rank_zero
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.safe_load import is_object_storage, local_path, refuse_unreadable
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.consolidate import read_inert
from lightning_fasttrain.strategy.zero.zero_engine import Engine
from lightning_fasttrain.strategy.zero.zero_host import ZeROHost

TAG = "checkpoint"  # Lightning's name for DeepSpeed's folder inside the folder

# Classes that DeepSpeed stores in its files, beyond those that torch considers safe. They only hold values.
KNOWN_CLASSES = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)


def save_atomically(
    host: ZeROHost, path: str | Path, step: int | None, save: Callable[[Path], None], plain: Mapping[str, object]
) -> None:
    """Save a checkpoint from all ranks into a temporary folder, which is renamed to ``path`` when complete.

    For object storage each rank has a temporary folder of its own, and uploads its files; the manifest is written last.
    It warns that the accumulated gradient is not saved, if an accumulation window is open.

    Args:
        host: the strategy, whose engine is saved.
        path: path of the checkpoint, or its address in object storage; an existing one is replaced.
        step: optimizer step, recorded in the manifest.
        save: function that is called on every rank with the folder.
        plain: the values that are saved in addition to model and optimizer.

    Raises:
        ValueError: ``plain`` holds a value that could not be read back; names it.
        OSError: a rank could not write; an older folder of this name is not changed.
    """
    assert host.engine is not None
    if host.inside_window:
        why = "the accumulated gradient is sharded over all ranks, and is not saved"
        warn(explain("a ZeRO checkpoint inside an accumulation window", why, "Save after an optimizer step"))
    path = host.broadcast(path)
    about = {"format": "deepspeed", "stage": host.stage, **mark_of(host).facts(step)}
    # DeepSpeed saves these two itself.
    others = without(plain, ["state_dict", "optimizer_states"])
    try:
        with folder_to_write(path, ranks=all_ranks(), about=about) as folder, host.engine.save_alone():
            # Checked in this context, so that an error reaches all ranks.
            refuse_unreadable(others)
            # Lightning would have all ranks write into the folder of rank zero, which other nodes do not see.
            with patched(host, "broadcast", lambda own, src=0: own):
                save(folder)
    finally:
        host.engine.end_saving()


@contextmanager
def folder_to_load(host: ZeROHost, path: str | Path, *, optimizer_too: bool) -> Iterator[Path]:
    """Yield a folder that DeepSpeed may load: ``path``, an older one of its run, or one converted to this world size.

    Rank zero inspects the files and broadcasts the result; of a checkpoint in object storage, each node has a copy.

    Args:
        host: the strategy, whose engine loads.
        path: the path that the user gave.
        optimizer_too: whether optimizer state is to be loaded, which depends on the number of processes.

    Raises:
        CorruptCheckpoint: the checkpoint is truncated or changed, and there is no intact older one.
        ValueError: the checkpoint has another world size or stage, or objects of unknown classes; raised on all ranks.
    """
    engine = host.engine
    assert engine is not None
    with ExitStack() as undo:
        from_one: Callable[[Callable[[], Any]], Any] = from_rank_zero
        if is_object_storage(path):
            path, from_one = undo.enter_context(fetched_on_each_node(str(path))), from_first_of_node
        folder, convert = from_one(lambda: _inspect(local_path(path), host, optimizer_too))
        if not convert:
            yield folder
            return
        _refuse_not_adam(engine)
        made = from_one(lambda: _convert(folder, undo))
        undo.callback(host.barrier)  # before it is removed
        config = engine.deepspeed._config
        # DeepSpeed reads its config while it loads.
        config.load_universal_checkpoint = True
        try:
            yield made
        finally:
            config.load_universal_checkpoint = False
        if host.stage == 3:
            _restore_groups(engine, made)
            _separate_steps(engine)


def _convert(folder: Path, undo: ExitStack) -> Path:
    """Convert a checkpoint to DeepSpeed's universal format, in a folder next to it that ``undo`` removes."""
    made = undo.enter_context(scratch_folder(folder.parent, "universal"))
    settings = argparse.Namespace(
        input_folder=str(folder / TAG),
        output_folder=str(made / TAG),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        from deepspeed.checkpoint import ds_to_universal

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(settings)
    except Exception as error:  # DeepSpeed's own, of any kind
        why = f"DeepSpeed's conversion failed with {type(error).__name__}: {error}"
        way_out = "Use the same number of processes as when saving, or start from consolidate(...)"
        what = f"{folder} cannot be converted for another number of processes"
        raise ValueError(explain(what, why, way_out)) from error
    return made


def _refuse_not_adam(engine: Engine) -> None:
    inner = engine.deepspeed.basic_optimizer
    # Adam and its relatives, of whichever package, have this setting; what lacks their state fails in the conversion.
    if "betas" not in inner.defaults:
        why = "DeepSpeed's universal format supports the state of Adam only"
        way_out = "Use the same number of processes as when saving, or start from consolidate(...)"
        raise ValueError(explain(f"universal=True with {type(inner).__name__}", why, way_out))


def _restore_groups(engine: Engine, made: Path) -> None:
    """Restore each parameter group's settings: at stage 3 DeepSpeed gives the first group's settings to all groups."""
    saved = read_inert(made / TAG / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["param_groups"]
    for group, settings in zip(engine.deepspeed.basic_optimizer.param_groups, saved, strict=True):
        group.update(without(settings, ["params"]))


def _separate_steps(engine: Engine) -> None:
    """Give each parameter group its own step counter: at stage 3 DeepSpeed shares one tensor among all groups."""
    for state in engine.deepspeed.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _inspect(path: Path, host: ZeROHost, optimizer_too: bool) -> tuple[Path, bool]:
    """Return the folder to load, and whether it must be converted to this number of processes."""
    manifest: dict[str, Any] = {}
    stage, ranks = host.stage, host.world_size
    if not (host.trusted and path.exists() and not (path / MANIFEST).exists()):
        # A run that loads only weights does not resume.
        path = whole_or_older(path, substitute=optimizer_too)
        if path.is_dir():
            manifest = read_manifest(path)
    if not (path / TAG).is_dir():
        why = "not a DeepSpeed checkpoint"
        raise ValueError(explain(f"{path}", why, "Load it with the strategy that saved it"))
    if not host.trusted:
        for file in sorted(path.rglob("*.pt")):
            _refuse_unknown_classes(file)
    about = manifest.get("about", {})
    mark_of(host).continue_from(about)
    saved_stage, saved_ranks = about.get("stage", stage), manifest.get("world_size", ranks)
    # Below stage 3 the weights are in one file of the same format.
    fits = _kind(saved_stage) == _kind(stage) if optimizer_too else (saved_stage == 3) == (stage == 3)
    if not fits:
        what = f"{path} was saved under ZeRO stage {saved_stage}, and this run is stage {stage}"
        way_out = f"Use stage={saved_stage}, or start from consolidate({str(path)!r}, 'weights.safetensors')"
        raise ValueError(explain(what, "their files are sharded in different ways", way_out))
    differs = saved_ranks != ranks and stage > 0 and optimizer_too
    if differs and not host.universal:
        what = f"{path} was saved by {saved_ranks} processes, and this run has {ranks}"
        why = "the optimizer state is sharded for that number of processes"
        raise ValueError(explain(what, why, f"Use {saved_ranks} processes, or universal=True, which converts it"))
    return path, differs


def _kind(stage: int) -> int:
    return {0: 0, 1: 1, 2: 1, 3: 3}[stage]  # stages 1 and 2 save the same files


def _refuse_unknown_classes(file: Path) -> None:
    """Refuse a file with objects of unknown classes: DeepSpeed unpickles its files, which can run any code."""
    unknown = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - KNOWN_CLASSES)
    if unknown:
        why = "loading them would run code from the file"
        way_out = "If you trust its origin, give trusted=True to the strategy"
        raise ValueError(explain(f"{file} holds objects of {', '.join(unknown[:3])}", why, way_out))
