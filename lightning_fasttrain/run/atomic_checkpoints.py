"""Checkpoints that are either whole or not there, and are never unpickled."""

import os
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain._checkpoint_choice import whole_or_older
from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._guarded_loading import guard_loading
from lightning_fasttrain._messages import explain, warn
from lightning_fasttrain._plain_values import refuse_unreadable
from lightning_fasttrain._reading import is_remote, local_path, read_archive
from lightning_fasttrain._run_mark import KEY, RunMark, step_in
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain._technique import Technique


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

    verifies: ClassVar[bool] = True

    def __init__(self, substitute: bool = False) -> None:
        self.substitute = substitute
        self.run = RunMark()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``, whole or not at all.

        Raises:
            ValueError: it holds something that could not be read back; names it.
            OSError: it could not be written; an older file at ``path`` is as it was.
        """
        refuse_unreadable(checkpoint)
        if is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        marked = {**checkpoint, KEY: self.run.facts(step_in(checkpoint))}
        try:
            write_atomic(path, lambda file: torch.save(marked, file))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            raise OSError(
                explain(
                    f"checkpoint {os.fspath(path)} could not be written",
                    f"{error}; an older file of this name is untouched",
                    "Free some space, or choose another folder",
                )
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
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
        if weights_only is False:
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        else:
            checkpoint = read_archive(path, map_location=map_location)
        if isinstance(checkpoint, dict):
            self.run.go_on_from(checkpoint.pop(KEY, None))
        return checkpoint


class AtomicCheckpoints(Technique):
    """Write this run's checkpoints so that a crash leaves the old one or the new one, and load them safely.

    Acts on the strategy's checkpoint plugin, for the length of the run. A plugin of your own, and strategies that
    write sharded checkpoints themselves, are left alone, and it is said.

    In ``fit``, an older whole checkpoint of the same run takes the place of a damaged one, which is said; in
    ``validate``, ``test`` and ``predict`` the damage is an error.

    Example:
        >>> checkpoints = AtomicCheckpoints()

    Source:
        See :class:`AtomicCheckpointIO`.
    """

    effect: ClassVar[str] = "a crash during a save never costs the last checkpoint"
    in_a_loop: ClassVar[str] = (
        "Fabric(plugins=[AtomicCheckpointIO()]), or AtomicCheckpointIO().save_checkpoint(state, path)"
    )

    def __init__(self) -> None:
        self._run = RunMark()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        strategy = trainer.strategy
        theirs = strategy.checkpoint_io
        if type(theirs) is not TorchCheckpointIO:
            warn(
                explain(
                    f"AtomicCheckpoints with {type(theirs).__name__}",
                    "this run already has a checkpoint plugin of its own, which is kept",
                    "Leave one of the two out",
                )
            )
            return None
        ours = AtomicCheckpointIO(substitute=trainer.state.fn == TrainerFn.FITTING)
        ours.run = self._run
        strategy.checkpoint_io = ours
        unguard = guard_loading(strategy)

        def undo() -> None:
            unguard()
            strategy.checkpoint_io = theirs

        return undo
