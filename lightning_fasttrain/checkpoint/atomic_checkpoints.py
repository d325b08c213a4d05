"""Atomic checkpoints: a file is either complete or absent, is never unpickled, and may be written in the background."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.checkpoint.background_save import BackgroundSave
from lightning_fasttrain.checkpoint.newest_checkpoint import KEY, RunMark, guard_loading, step_in, sweep, whole_or_older
from lightning_fasttrain.checkpoint.remote_checkpoint import fetched, remove_remote, upload_file, why_unwritable_storage
from lightning_fasttrain.core.atomic_write import free_disk_bytes, why_unwritable, write_atomic
from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.distributed import largest_over_ranks
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, log, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all
from lightning_fasttrain.core.safe_load import is_object_storage, is_remote, local_path, read_archive, refuse_unreadable
from lightning_fasttrain.technique import Technique


@check_arguments
class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, syncs it and renames it; loads tensors and plain values only.

    Lightning writes to the system's temporary folder and moves the file. Where that folder is on another file
    system the move is a copy, so a crash or a full disk during a save destroys the previous checkpoint.
    Each file also records its run and its step, under ``lightning_fasttrain.run``.

    For ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``. A checkpoint at an address such as ``s3://…`` goes
    through the system's temporary folder, in both directions; ``storage_options`` are then not used.

    Args:
        substitute: whether an older undamaged file of the same run is loaded in place of a damaged one. Meant for
            resuming training; to evaluate given weights, another file's weights would be a wrong answer.

    Example:
        >>> import torch
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> AtomicCheckpointIO().save_checkpoint({"step": 3}, path)
        >>> AtomicCheckpointIO().load_checkpoint(path)
        {'step': 3}

    Source:
        The usual sequence of write, fsync, rename, fsync of the folder; Lightning issue 19970.
    """

    # With this, a guard on the strategy does not read the file a second time.
    verifies: ClassVar[bool] = True

    def __init__(self, substitute: bool = False) -> None:
        self.substitute = substitute
        self.run = RunMark()

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: str | Path, storage_options: object = None
    ) -> None:
        """Write ``checkpoint`` to ``path``, completely or not at all.

        Raises:
            ValueError: ``checkpoint`` holds an object that could not be loaded again; the message names it.
            OSError: ``path`` could not be written; an older file at ``path`` is unchanged.
        """
        # Now, rather than when a later run needs the file.
        refuse_unreadable(checkpoint)
        # A copy, since the caller's dictionary must not change.
        marked = {**checkpoint, KEY: self.run.facts(step_in(checkpoint))}
        if is_object_storage(path):
            with tempfile.TemporaryDirectory(prefix="fasttrain-upload-") as folder:
                upload_file(write_atomic(Path(folder) / "checkpoint", lambda file: torch.save(marked, file)), str(path))
            return
        try:
            write_atomic(path, lambda file: torch.save(marked, file))
        except OSError as error:
            free = f"{free_disk_bytes(Path(path)) / GIB:.2f} GiB are free"
            why = f"{error}; {free}, and an older file of this name is unchanged"
            way_out = "Free some space, or choose another folder"
            raise OSError(explain(f"checkpoint {os.fspath(path)} could not be written", why, way_out)) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove ``path``."""
        if is_object_storage(path):
            remove_remote(str(path))
        else:
            super().remove_checkpoint(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain values from ``path``; other objects need ``weights_only=False`` in the call.

        The file's checksums are verified, which ``torch.load`` does not do.

        Raises:
            CorruptCheckpoint: the file is damaged, and no older file of the same run exists or may be used.
            ValueError: the file holds other objects.
            OSError: ``path`` is an address that cannot be read, such as with wrong credentials.
        """
        if is_object_storage(path):
            with fetched(str(path)) as copied:
                return self.load_checkpoint(copied, map_location, weights_only)
        path = whole_or_older(local_path(path), substitute=self.substitute)
        if path.is_dir():
            why = "it is a folder, as written by strategies that shard the model"
            raise ValueError(explain(f"{path}", why, "Use the strategy that saved it, or consolidate(...)"))
        if weights_only is False:  # None means "not given"
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        else:
            checkpoint = read_archive(path, map_location=map_location)
        if isinstance(checkpoint, dict):
            # Removed, so that the returned dictionary equals the saved one.
            self.run.continue_from(checkpoint.pop(KEY, None))
        return checkpoint


@check_arguments
class BackgroundCheckpointIO(CheckpointIO):
    """Copies a checkpoint to host memory, and lets another plugin write the copy while training continues.

    One copy is held at a time: a save waits until the one before is written. An error of a save is raised by the next
    one, by :meth:`wait`, or when the file is loaded. An older checkpoint is removed only after the newer one is
    written. A program that exits waits for its last checkpoint.

    For ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``; call :meth:`wait` at the end of a Fabric loop.

    Args:
        inner: plugin that writes and reads; it must not call collectives.

    Example:
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> io = BackgroundCheckpointIO(AtomicCheckpointIO())
        >>> io.save_checkpoint({"step": 3}, path)
        >>> io.load_checkpoint(path)
        {'step': 3}

    Source:
        Lightning's ``AsyncCheckpointIO``, which holds any number of copies, and removes the old file before the new one
        is written.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self._background = BackgroundSave(inner.save_checkpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner,)  # a thread cannot be copied

    @property
    def verifies(self) -> bool:
        return getattr(self.inner, "verifies", False)

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: str | Path, storage_options: object = None
    ) -> None:
        """Copy ``checkpoint`` and begin to write it, after the checkpoint before is written.

        Raises:
            ValueError: ``checkpoint`` holds an object that could not be loaded again.
            OSError: the checkpoint before could not be written; this one is being written nevertheless.
        """
        if isinstance(self.inner, AtomicCheckpointIO):
            refuse_unreadable(checkpoint)
        try:
            self.wait()
        finally:
            # A plugin of the user may not know storage_options.
            options = () if storage_options is None else (storage_options,)
            self._background.start(checkpoint, path, *options)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load ``path`` after the save in flight is written."""
        self.wait()
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove ``path`` after the save in flight is written; if it fails, ``path`` is kept."""
        self._background.do_afterwards(lambda: self.inner.remove_checkpoint(path))

    def wait(self) -> None:
        """Wait until no checkpoint is being written, and raise the error of the last save, if any."""
        self._background.wait()

    def finish(self) -> None:
        """Wait as :meth:`wait` does, but warn instead of raising an error, for a run that has failed already."""
        self._background.give_up(None)

    def teardown(self) -> None:
        self.inner.teardown()


class AtomicCheckpoints(Technique):
    """Write this run's checkpoints so that a crash leaves the old one or the new one, and load them safely.

    Acts on the strategy's checkpoint plugin, for the length of the run. Your own plugin, and strategies that
    write sharded checkpoints themselves, are left unchanged, with a warning.

    In ``fit``, a damaged checkpoint is replaced by an older undamaged one of the same run, with a warning; in
    ``validate``, ``test`` and ``predict`` the damage is an error.

    Before the run, the folders of its ModelCheckpoints are probed: they must be writable and have free space for two
    checkpoints. Objects that could not be loaded again are refused, by name, when they are saved.

    Args:
        on_failed_save: ``"stop"`` ends the run; ``"warn"`` continues, and keeps older checkpoints until a newer one
            could be written. The same holds for a folder that is not writable or too full.
        background: write while training continues, from a copy in host memory; see :class:`BackgroundCheckpointIO`.
            An error is then raised at the next save or at the end of the run. Your own checkpoint plugin is used too.
            Strategies that shard write by themselves: for FSDP2 give ``FSDP2Strategy(async_checkpoints=True)``.

    Raises:
        OSError: in ``fit``: a folder is not writable or too full, or a checkpoint could not be written.

    Example:
        >>> checkpoints = AtomicCheckpoints(on_failed_save="warn")

    Source:
        See :class:`AtomicCheckpointIO`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a crash during a save never costs the last checkpoint"
    when: ClassVar[str] = "a run writes checkpoints; it costs no more than a temporary file name"
    in_a_loop: ClassVar[str] = "Fabric(plugins=[checkpoint.AtomicCheckpointIO()]), or its save_checkpoint(state, path)"
    predicted: ClassVar[bool] = True

    def __init__(self, on_failed_save: str = "stop", background: bool = False) -> None:
        self.on_failed_save = one_of("on_failed_save", on_failed_save, ("stop", "warn"))
        self.background = background
        self._run = RunMark()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        strategy, undo = trainer.strategy, ExitStack()
        # With DDP one rank writes. Unless its error is shared, the other ranks wait for it without end.
        if self.on_failed_save == "warn" or isinstance(strategy, DDPStrategy):
            undo.callback(share_failed_saves(strategy, continue_training=self.on_failed_save == "warn"))
        theirs = ours = strategy.checkpoint_io
        # A subclass is the user's own plugin.
        if type(theirs) is TorchCheckpointIO:
            ours = AtomicCheckpointIO(substitute=trainer.state.fn == TrainerFn.FITTING)
            ours.run = self._run
            undo.callback(guard_loading(strategy))
        else:
            why = "this run already has its own checkpoint plugin, which is kept"
            warn(explain(f"AtomicCheckpoints with {type(theirs).__name__}", why, "Remove one of the two"))
        if self.background and can_write_in_background(strategy):
            ours = BackgroundCheckpointIO(ours)
            undo.callback(self._finish, trainer, ours)
        strategy.checkpoint_io = ours
        undo.callback(setattr, strategy, "checkpoint_io", theirs)
        return undo.close

    def _finish(self, trainer: L.Trainer, io: BackgroundCheckpointIO) -> None:
        # An error of the last save must not replace the one that the run failed with.
        if trainer.interrupted:
            io.finish()
        else:
            io.wait()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the model and optimizers exist, so a checkpoint's size is known, and nothing is trained yet."""
        probe_folders(trainer, trainer.optimizers)
        is_ours = isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO | BackgroundCheckpointIO)
        if is_ours:
            refuse_unreadable_settings(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: all checkpoints of the run are saved, and the last one may still be in flight."""
        io = trainer.strategy.checkpoint_io
        if isinstance(io, BackgroundCheckpointIO):
            save_on_all_ranks(trainer.strategy, io.wait, continue_training=self.on_failed_save == "warn")


def can_write_in_background(strategy: Strategy) -> bool:
    """Return whether :class:`BackgroundCheckpointIO` may be put around the strategy's plugin; warn if not."""
    name, plugin = type(strategy).__name__, strategy.checkpoint_io
    if getattr(strategy, "async_checkpoints", False) or isinstance(plugin, BackgroundCheckpointIO | AsyncCheckpointIO):
        return False  # it writes in the background already
    if replicates(strategy):
        return True
    why = "this strategy writes checkpoints itself, so training waits for each"
    way_out = "Under FSDP2 use FSDP2Strategy(async_checkpoints=True), otherwise save less often"
    warn(explain(f"AtomicCheckpoints(background=True) with {name}", why, way_out))
    return False


def probe_folders(trainer: L.Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Check before a run that the folders of its ModelCheckpoints are writable and have enough free space.

    Raises:
        OSError: on all ranks, if a folder fails; a warning instead with ``on_failed_save="warn"``.
    """
    reason = check_folders(trainer, optimizers)
    if reason is not None and _only_warns(trainer):
        warn(reason)
    elif reason is not None:
        raise OSError(reason)


def refuse_unreadable_settings(trainer: L.Trainer) -> None:
    """Refuse hyper-parameters that :func:`refuse_unreadable` would refuse at the first checkpoint of the run."""
    if not trainer.checkpoint_callbacks or _only_warns(trainer):
        return
    for owner in filter(None, (trainer.lightning_module, trainer.datamodule)):
        settings = owner.hparams
        if isinstance(settings, dict):
            settings = dict(settings)  # as Lightning saves it
        refuse_unreadable({owner.CHECKPOINT_HYPER_PARAMS_KEY: settings})


def _only_warns(trainer: L.Trainer) -> bool:
    """Check whether the run is to continue where a checkpoint cannot be saved."""
    policies = [callback.on_failed_save for callback in trainer.callbacks if isinstance(callback, AtomicCheckpoints)]
    return "warn" in policies


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
    because = ", and one is kept while the next is written" if copies == 2 else ""
    return why_too_full(folder, nbytes, copies, because, f"Free some space, or {way_out}")


def why_too_full(folder: Path, nbytes: int, copies: int, because: str, way_out: str) -> str | None:
    """Return why the disk of ``folder`` has no space for so many checkpoints of ``nbytes``; None if it has.

    Args:
        because: why there are so many at once, which ends a sentence.
    """
    free, needed = free_disk_bytes(folder), copies * nbytes
    if free >= needed:
        return None
    what = f"{folder} has {free / GIB:.2f} GiB free, {(needed - free) / GIB:.2f} GiB are missing"
    return explain(what, f"a checkpoint takes about {nbytes / GIB:.2f} GiB{because}", way_out)


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
        # A collective, so all ranks must come here, also those whose save succeeded.
        failed, bad = map(bool, largest_over_ranks([failed, bad]))
    if bad:
        raise error or OSError("a checkpoint could not be saved. See the error of the rank that writes")
    if failed:
        warn(f"{error or 'a checkpoint could not be written.'} Training continues without this checkpoint.")
    return failed
