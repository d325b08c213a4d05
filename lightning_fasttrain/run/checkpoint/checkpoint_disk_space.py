"""Check before a run whether a folder can hold its checkpoints, and handle saves that fail."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.files.atomic_write import free_disk_bytes, why_unwritable
from lightning_fasttrain.core.files.newest_checkpoint import sweep
from lightning_fasttrain.core.files.remote_checkpoint import why_unwritable_storage
from lightning_fasttrain.core.files.safe_load import is_object_storage, is_remote
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, log, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all


def check_folders(trainer: L.Trainer, optimizers: Sequence[Optimizer]) -> str | None:
    """Return why the folders of this run's checkpoints fail, the same on all ranks; None if they do not.

    Incomplete files of an earlier, killed run are removed first.
    """
    reason = None
    # One rank writes, so one rank checks; the broadcast makes the answer the same for all.
    if trainer.is_global_zero:
        writers = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.dirpath is not None]
        for writer in writers:
            folder = str(writer.dirpath)
            if reason is None and is_object_storage(folder):
                reason = why_unwritable_storage(folder)
            elif reason is None and not is_remote(folder):
                sweep(Path(folder))
                nbytes = checkpoint_bytes(trainer, [] if writer.save_weights_only else optimizers)
                reason = why_unfit(Path(folder), nbytes, "give ModelCheckpoint another dirpath")
    return trainer.strategy.broadcast(reason)


def why_unfit(folder: Path, nbytes: int, way_out: str, copies: int = 2) -> str | None:
    """Return why ``folder`` cannot hold so many checkpoints of ``nbytes``; None if it can.

    Two, where one is kept while the next is written.

    Example:
        >>> why_unfit(getfixture("tmp_path") / "checkpoints", 1000, "choose another folder") is None
        True
    """
    unwritable = why_unwritable(folder)
    if unwritable:
        return explain(f"checkpoints cannot be written to {folder}", unwritable, f"Make it writable, or {way_out}")
    free = free_disk_bytes(folder)
    if free < copies * nbytes:
        why = f"a checkpoint of this run takes about {nbytes / GIB:.2f} GiB"
        if copies == 2:
            why += ", and one is kept while the next is written"
        return explain(f"{folder} has {free / GIB:.2f} GiB free", why, f"Free some space, or {way_out}")
    return None


def checkpoint_bytes(trainer: L.Trainer, optimizers: Sequence[Optimizer]) -> int:
    """Estimate the size of one checkpoint in bytes, over all ranks: weights and optimizer state."""
    moments = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # Assumes that optimizer state has the dtype of the weights.
            moments += _moments(group) * _trained_bytes(group)
    if replicates(trainer.strategy):
        values = trainer.strategy.lightning_module_state_dict().values()
        # Tied weights are stored once.
        storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor)}
        return sum(storages.values()) + moments
    module = trainer.lightning_module
    return sum(map(_unsharded_bytes, (*module.parameters(), *module.buffers()))) + moments


def _unsharded_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that may be sharded over several ranks, unsharded."""
    # A ZeRO-3 parameter is empty between uses.
    return getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()


def _moments(group: Mapping[str, object]) -> int:
    """Return the number of state tensors an optimizer keeps per parameter, judged by its settings."""
    if "betas" in group:
        return 2
    return int(bool(group.get("momentum")))


def _trained_bytes(group: dict[str, Any]) -> int:
    return sum(_unsharded_bytes(p) for p in group["params"] if p.requires_grad)


def share_failed_saves(strategy: Strategy, continue_training: bool) -> Undo:
    """Share the error of a failed save with all ranks, so that they do not wait for the rank that writes.

    Args:
        strategy: the trainer's strategy.
        continue_training: whether to continue without this checkpoint, and keep older ones until a save succeeds.
    """
    save, remove, failed = strategy.save_checkpoint, strategy.remove_checkpoint, False

    def save_checkpoint(checkpoint: dict[str, Any], filepath: str | Path, *args: object, **kwargs: object) -> None:
        nonlocal failed
        failed = save_on_all_ranks(strategy, lambda: save(checkpoint, filepath, *args, **kwargs), continue_training)

    def remove_checkpoint(filepath: str | Path) -> None:
        if not failed:
            remove(filepath)

    return patch_all(strategy, {"save_checkpoint": save_checkpoint, "remove_checkpoint": remove_checkpoint})


def save_on_all_ranks(strategy: Strategy, save: Callable[[], None], continue_training: bool) -> bool:
    """Call ``save``, and return whether it failed on any rank of DDP; all ranks must call it.

    Raises:
        OSError: it failed on some rank; a warning instead with ``continue_training``.
    """
    error: Exception | None = None
    try:
        save()
    except Exception as caught:
        error = caught
    bad = error is not None and not (continue_training and isinstance(error, OSError))
    failed = error is not None
    # Under DDP one process writes; sharding strategies agree by themselves.
    if isinstance(strategy, DDPStrategy):
        if error is not None:
            # Logged now, since the other ranks may never answer.
            log.error("%s", error)
        # Two collectives, so all ranks must come here, also those whose save succeeded.
        failed = not strategy.reduce_boolean_decision(not failed, all=True)
        bad = not strategy.reduce_boolean_decision(not bad, all=True)
    if bad:
        raise error or OSError("a checkpoint could not be saved. See the error of the rank that writes")
    if failed:
        warn(f"{error or 'a checkpoint could not be written.'} Training continues without this checkpoint.")
    return failed
