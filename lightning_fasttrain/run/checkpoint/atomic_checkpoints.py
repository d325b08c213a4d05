"""Checkpoints that are either whole or not there, and are never unpickled."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.files.atomic_write import free_disk_bytes, write_atomic
from lightning_fasttrain.core.files.guarded_loading import guard_loading
from lightning_fasttrain.core.files.newest_checkpoint import whole_or_older
from lightning_fasttrain.core.files.plain_values import refuse_unreadable
from lightning_fasttrain.core.files.run_mark import KEY, RunMark, step_in
from lightning_fasttrain.core.files.safe_load import is_remote, local_path, read_archive
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.run.checkpoint.checkpoint_disk_space import check_folders, share_failed_saves
from lightning_fasttrain.technique import Technique


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, syncs it and renames it; loads tensors and plain values only.

    Lightning writes to the system's temporary folder and moves the file. Where that folder lies on another file
    system the move is a copy, so a crash, or a full disk, during a save destroys the checkpoint that was there.
    Beside what it is given, a file holds which run it is of and its step, under ``lightning_fasttrain.run``.

    For ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``. It reads files of this machine only.

    Args:
        substitute: whether, for a damaged file, an older whole one of the same run is loaded. For going on with
            training; where the weights themselves are asked for, another file's would be a wrong answer.

    Example:
        >>> import torch
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> AtomicCheckpointIO().save_checkpoint({"step": 3}, path)
        >>> AtomicCheckpointIO().load_checkpoint(path)
        {'step': 3}

    Source:
        The usual write, fsync, rename, fsync of the folder; Lightning issue 19970.
    """

    verifies: ClassVar[bool] = True  # so that a guard on the strategy does not read the file a second time

    def __init__(self, substitute: bool = False) -> None:
        self.substitute = substitute
        self.run = RunMark()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``, whole or not at all.

        Raises:
            ValueError: it holds something that could not be read back; names it.
            OSError: it could not be written; an older file at ``path`` is as it was.
        """
        refuse_unreadable(checkpoint)
        if is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # A copy, since the caller's dictionary stays as it was.
        marked = {**checkpoint, KEY: self.run.facts(step_in(checkpoint))}
        try:
            write_atomic(path, lambda file: _save(marked, file))
        except OSError as error:
            free = f"{free_disk_bytes(Path(path)) / GIB:.2f} GiB are free there"
            why = f"{error}; {free}, and an older file of this name is untouched"
            way_out = "Free some space, or choose another folder"
            raise OSError(explain(f"checkpoint {os.fspath(path)} could not be written", why, way_out)) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain values from ``path``; anything else needs ``weights_only=False`` in this very call.

        The file is held against its checksums, which ``torch.load`` does not look at.

        Raises:
            CorruptCheckpoint: it is damaged, and there is no older one of the same run, or none may be taken.
            ValueError: the file holds other objects; or it is an address, of which nothing is fetched.
        """
        path = whole_or_older(local_path(path), substitute=self.substitute)
        if path.is_dir():
            why = "it is a folder, as strategies that shard write them"
            raise ValueError(explain(f"{path}", why, "Use the strategy that saved it, or consolidate(...)"))
        if weights_only is False:  # by name only: None stands for "not said"
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        else:
            checkpoint = read_archive(path, map_location=map_location)
        if isinstance(checkpoint, dict):
            self.run.go_on_from(checkpoint.pop(KEY, None))  # what comes back equals what was saved
        return checkpoint


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """``torch.save``, which says of a full disk what its archive's writer noticed: here it is what the disk said."""
    told: Any = _Telling(file)
    try:
        torch.save(checkpoint, told)
    except RuntimeError as error:
        raise (told.error or error) from error


class _Telling:
    """A file that remembers why it could not be written to."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


class AtomicCheckpoints(Technique):
    """Write this run's checkpoints so that a crash leaves the old one or the new one, and load them safely.

    Acts on the strategy's checkpoint plugin, for the length of the run. A plugin of your own, and strategies that
    write sharded checkpoints themselves, are left alone, and it is said.

    In ``fit``, an older whole checkpoint of the same run takes the place of a damaged one, which is said; in
    ``validate``, ``test`` and ``predict`` the damage is an error.

    Before the run, the folders of its ModelCheckpoints are probed: they can be written to, and have room for two
    checkpoints. What could not be read back is refused when it is saved, by name.

    Args:
        on_failed_save: ``"stop"`` the run, or ``"warn"`` and go on; older checkpoints are then kept until a newer one
            could be written. The same for a folder that will not do.

    Raises:
        OSError: in ``fit``: a folder will not do, or a checkpoint could not be written.

    Example:
        >>> checkpoints = AtomicCheckpoints(on_failed_save="warn")

    Source:
        See :class:`AtomicCheckpointIO`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a crash during a save never costs the last checkpoint"
    when: ClassVar[str] = "a checkpoint is worth more than the second name that it is written under first: always"
    in_a_loop: ClassVar[str] = (
        "Fabric(plugins=[run.AtomicCheckpointIO()]), or run.AtomicCheckpointIO().save_checkpoint(state, path)"
    )
    predicted: ClassVar[bool] = True

    def __init__(self, on_failed_save: str = "stop") -> None:
        self.on_failed_save = one_of("on_failed_save", on_failed_save, ("stop", "warn"))
        self._run = RunMark()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        strategy, undo = trainer.strategy, ExitStack()
        # With DDP one rank writes. The others would wait for it for ever if its error stayed its own.
        if self.on_failed_save == "warn" or isinstance(strategy, DDPStrategy):
            undo.callback(share_failed_saves(strategy, go_on=self.on_failed_save == "warn"))
        theirs = strategy.checkpoint_io
        if type(theirs) is not TorchCheckpointIO:  # a subclass is one of the user's own
            why = "this run already has a checkpoint plugin of its own, which is kept"
            warn(explain(f"AtomicCheckpoints with {type(theirs).__name__}", why, "Leave one of the two out"))
            return undo.close
        ours = AtomicCheckpointIO(substitute=trainer.state.fn == TrainerFn.FITTING)
        ours.run = self._run
        strategy.checkpoint_io = ours
        undo.callback(setattr, strategy, "checkpoint_io", theirs)
        undo.callback(guard_loading(strategy))
        return undo.close

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: model and optimizers are there, so that a checkpoint's size is known, and nothing is trained yet."""
        probe_folders(trainer, trainer.optimizers)


def probe_folders(trainer: L.Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Before a run: can the folders of its ModelCheckpoints be written to, and do they have room?

    Raises:
        OSError: on all ranks, if one will not do; where AtomicCheckpoints is to go on with training, a warning.
    """
    reason = check_folders(trainer, optimizers)
    policies = [callback.on_failed_save for callback in trainer.callbacks if isinstance(callback, AtomicCheckpoints)]
    if reason is not None and "warn" in policies:
        warn(reason)
    elif reason is not None:
        raise OSError(reason)
