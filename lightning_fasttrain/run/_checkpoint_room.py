"""Whether a folder can take a run's checkpoints, asked before the run; and what becomes of it if a save fails."""

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_fasttrain._checkpoint_choice import sweep
from lightning_fasttrain._files import TEMPORARY
from lightning_fasttrain._messages import explain, warn
from lightning_fasttrain._reading import is_remote
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain._technique import patch

GIB = 2**30


def check_folders(trainer: L.Trainer) -> str | None:
    """Why the folders of this run's checkpoints will not do, the same on all ranks; None if they will.

    What an earlier, killed run left half written there is removed first.
    """
    reason = None
    if trainer.is_global_zero:
        writers = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.dirpath is not None]
        for writer in writers:
            if reason is None and not is_remote(writer.dirpath):
                sweep(Path(str(writer.dirpath)))
                reason = unfit(Path(str(writer.dirpath)), checkpoint_bytes(trainer, writer.save_weights_only))
    return trainer.strategy.broadcast(reason)


def unfit(folder: Path, nbytes: int) -> str | None:
    """Why ``folder`` cannot take two checkpoints of so many bytes: one is there while the next is written.

    Example:
        >>> unfit(getfixture("tmp_path") / "checkpoints", 1000) is None
        True
    """
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    probe = there / f"{TEMPORARY}probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        probe.unlink()
    except OSError as error:
        return explain(
            f"checkpoints cannot be written to {folder}",
            f"{error.strerror or error} ({there})",
            "Make it writable, or give ModelCheckpoint another dirpath",
        )
    free = shutil.disk_usage(there).free
    if free < 2 * nbytes:
        return explain(
            f"{folder} has {free / GIB:.2f} GiB free",
            f"a checkpoint of this run takes about {nbytes / GIB:.2f} GiB, and one is kept while the next is written",
            "Free some space, or give ModelCheckpoint another dirpath",
        )
    return None


def checkpoint_bytes(trainer: L.Trainer, weights_only: bool) -> int:
    """About how large one file will be: weights, and what the optimizers will hold. 0 where it is spread over ranks."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return 0
    values = trainer.strategy.lightning_module_state_dict().values()
    storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor)}
    groups = [] if weights_only else [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return sum(storages.values()) + sum(_moments(group) * _trained_bytes(group) for group in groups)


def _moments(group: dict[str, Any]) -> int:
    """How many numbers an optimizer keeps for each parameter, by the settings that all of torch's have."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _trained_bytes(group: dict[str, Any]) -> int:
    return sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)


def survive_failed_saves(strategy: Any) -> Undo:
    """Let training go on when a checkpoint cannot be written, which is said; older ones are kept until one can be."""
    save, remove, failed = strategy.save_checkpoint, strategy.remove_checkpoint, False

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal failed
        why = None
        try:
            save(checkpoint, filepath, *args, **kwargs)
        except OSError as error:
            why = str(error)
        failed = why is not None
        if isinstance(strategy, DDPStrategy):  # one process writes; strategies of shards agree by themselves
            failed = not strategy.reduce_boolean_decision(not failed, all=True)
        if failed:
            warn(f"{why or 'the checkpoint could not be written.'} Training goes on without this checkpoint.")

    def remove_checkpoint(filepath: Any) -> None:
        if not failed:
            remove(filepath)

    undo = ExitStack()
    undo.callback(patch(strategy, "save_checkpoint", save_checkpoint))
    undo.callback(patch(strategy, "remove_checkpoint", remove_checkpoint))
    return undo.close
