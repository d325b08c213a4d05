"""Checkpoints of DeepSpeed engines: written aside and checksummed, looked at before they are unpickled."""

import argparse
import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.core.files.atomic_write import TEMPORARY
from lightning_fasttrain.core.files.checkpoint_folder import (
    MANIFEST,
    checkpoint_folder,
    mark_folder,
    read_manifest,
)
from lightning_fasttrain.core.files.newest_checkpoint import whole_or_older
from lightning_fasttrain.core.files.run_mark import mark_of
from lightning_fasttrain.core.files.safe_load import local_path, refuse_unreadable
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.strategy.rank_health import RollCall
from lightning_fasttrain.strategy.zero._zero_engine import Engine
from lightning_fasttrain.strategy.zero._zero_files import read_inert

TAG = "checkpoint"  # Lightning's name for DeepSpeed's folder inside the folder

# Classes that DeepSpeed puts into its files, beyond what torch takes for safe. None does anything but
# hold values when it is made.
KNOWN_CLASSES = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)


def warn_inside_window(inside: bool) -> None:
    """Say that a checkpoint will lack the gradient so far, if an accumulation window is open."""
    if inside:
        why = "the gradient of the batches so far is in pieces on all ranks, and is not saved"
        warn(explain("a ZeRO checkpoint inside an accumulation window", why, "Save after an optimizer step"))


def save_whole(
    strategy: Any,
    path: str | Path,
    engine: Engine,
    stage: int,
    step: int | None,
    save: Callable[[Path], None],
    plain: Mapping[str, Any],
) -> None:
    """Let all ranks write into a folder beside ``path``, which takes its name when it is complete.

    Args:
        strategy: ours, for ranks, broadcast and roll call.
        path: the checkpoint; what is there is replaced.
        engine: that will save.
        stage: noted in the manifest.
        step: likewise.
        save: called on every rank with the folder.
        plain: what is saved beside model and optimizer.

    Raises:
        ValueError: ``plain`` holds something that could not be read back; names it.
        OSError: a rank could not write; an older folder of this name is as it was.
        RuntimeError: a rank is gone.
    """
    roll_call: RollCall = strategy.roll_call
    path = local_path(strategy.broadcast(path))
    about = {"format": "deepspeed", "stage": stage, **mark_of(strategy).facts(step)}
    ranks = {"rank": strategy.global_rank, "world_size": strategy.world_size, "agree": roll_call}
    # DeepSpeed saves these two itself.
    others = {key: value for key, value in plain.items() if key not in ("state_dict", "optimizer_states")}
    try:
        with checkpoint_folder(path, **ranks, about=about) as folder, engine.save_alone():
            refuse_unreadable(others)  # here, so that all ranks hear of it
            save(folder)
    finally:
        if not roll_call.broken:
            engine.end_saving()  # a collective, so only while all ranks are there


@contextmanager
def folder_to_load(
    strategy: Any, path: str | Path, engine: Engine, *, stage: int, trusted: bool, universal: bool, optimizer_too: bool
) -> Iterator[Path]:
    """Yield a folder that DeepSpeed may load: ``path``, an older one of its run, or one converted to this world size.

    Rank zero looks at the files; what it finds holds for all.

    Args:
        strategy: Lightning's, for ranks and broadcast.
        path: as the user gave it.
        engine: that will load.
        stage: of this run.
        trusted: let objects of unknown classes pass, and folders without a manifest.
        universal: convert what was saved by another number of processes.
        optimizer_too: whether optimizer state is to be loaded, which depends on the number of processes.

    Raises:
        CorruptCheckpoint: it is cut short or changed, and there is no other.
        ValueError: another world size or stage, or objects of unknown classes; on all ranks.
    """
    found: Any = None
    if strategy.global_rank == 0:
        try:
            found = _look(local_path(path), strategy, stage, trusted, universal, optimizer_too)
        except (ValueError, OSError) as error:
            found = error
    found = strategy.broadcast(found)
    if isinstance(found, Exception):
        raise found
    folder, convert = found
    if not convert:
        yield folder
        return
    _refuse_not_adam(engine)
    with ExitStack() as undo:
        made = strategy.broadcast(_convert(folder, undo) if strategy.global_rank == 0 else None)
        if isinstance(made, Exception):
            raise made
        undo.callback(strategy.barrier)  # before rank zero removes it
        config = engine.deepspeed._config
        config.load_universal_checkpoint = True  # DeepSpeed asks its config while it loads
        try:
            yield made
        finally:
            config.load_universal_checkpoint = False
        if stage == 3:
            _restore_groups(engine, made)
            _separate_steps(engine)


def _convert(folder: Path, undo: ExitStack) -> Path | Exception:
    """The checkpoint in DeepSpeed's universal format, in a folder beside it that ``undo`` removes."""
    made = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}universal-", dir=folder.parent))
    undo.callback(shutil.rmtree, made, ignore_errors=True)
    undo.enter_context(mark_folder(made))  # so that nobody takes it for what a killed save has left
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
    except Exception as error:  # the other ranks wait for an answer
        why = f"DeepSpeed's conversion failed with {type(error).__name__}: {error}"
        way_out = "Use as many processes as saved it, or start from consolidate(...)"
        return ValueError(explain(f"{folder} cannot be converted for another number of processes", why, way_out))
    return made


def _refuse_not_adam(engine: Engine) -> None:
    inner = engine.deepspeed.basic_optimizer
    if "adam" not in type(inner).__name__.lower():
        why = "DeepSpeed's universal format knows the state of Adam only"
        way_out = "Use as many processes as saved the checkpoint, or start from consolidate(...)"
        raise ValueError(explain(f"universal=True with {type(inner).__name__}", why, way_out))


def _restore_groups(engine: Engine, made: Path) -> None:
    """At stage 3 DeepSpeed gives the first group's settings to all groups."""
    saved = read_inert(made / TAG / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["param_groups"]
    for group, settings in zip(engine.deepspeed.basic_optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _separate_steps(engine: Engine) -> None:
    """At stage 3 DeepSpeed gives all groups of parameters one tensor of steps: each would count for all of them."""
    for state in engine.deepspeed.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _look(
    path: Path, strategy: Any, stage: int, trusted: bool, universal: bool, optimizer_too: bool
) -> tuple[Path, bool]:
    manifest: dict[str, Any] = {}
    ranks = strategy.world_size
    if not (trusted and path.exists() and not (path / MANIFEST).exists()):
        path = whole_or_older(path, substitute=optimizer_too)  # with weights alone nothing goes on
        manifest = read_manifest(path) if path.is_dir() else {}
    if not (path / TAG).is_dir():
        why = "it is no checkpoint of DeepSpeed's"
        raise ValueError(explain(f"{path}", why, "Load it with the strategy that saved it"))
    files = sorted(path.rglob("*.pt"))
    if not trusted:
        for file in files:
            _refuse_unknown_classes(file)
    about = manifest.get("about", {})
    mark_of(strategy).continue_from(about)
    saved_stage, saved_ranks = about.get("stage", stage), manifest.get("world_size", ranks)
    # Weights alone are in one file below stage 3, whatever the stage.
    fits = _kind(saved_stage) == _kind(stage) if optimizer_too else (saved_stage == 3) == (stage == 3)
    if not fits:
        what = f"{path} was saved under ZeRO stage {saved_stage}, and this run is stage {stage}"
        way_out = f"Use stage={saved_stage}, or start from consolidate({str(path)!r}, 'weights.safetensors')"
        raise ValueError(explain(what, "their files are cut in different ways", way_out))
    differs = saved_ranks != ranks and stage > 0 and optimizer_too
    if differs and not universal:
        what = f"{path} was saved by {saved_ranks} processes, and this run has {ranks}"
        why = "each has a piece of the optimizer state, cut for its number of processes"
        raise ValueError(explain(what, why, f"Use {saved_ranks} processes, or universal=True, which converts it"))
    return path, differs


def _kind(stage: int) -> int:
    return {0: 0, 1: 1, 2: 1, 3: 3}[stage]  # 1 and 2 save the same


def _refuse_unknown_classes(file: Path) -> None:
    """DeepSpeed unpickles its files, so nothing may be in them that does something when it is unpickled."""
    unknown = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - KNOWN_CLASSES)
    if unknown:
        why = "to load them is to run code from the file"
        way_out = "If you know where it comes from, give trusted=True to the strategy"
        raise ValueError(explain(f"{file} holds objects of {', '.join(unknown[:3])}", why, way_out))
