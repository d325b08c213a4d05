"""Checkpoints that are either whole or not there, and are never unpickled."""

import os
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_fasttrain._checkpoint_folder import whole_or_newest
from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._messages import explain, warn
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain._technique import Technique


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, syncs it and renames it; loads tensors and plain values only.

    Lightning writes to the system's temporary folder and moves the file. Where that folder lies on another file
    system the move is a copy, so a crash, or a full disk, during a save destroys the checkpoint that was there.

    For ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``. Local paths only.

    Example:
        >>> import torch
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> AtomicCheckpointIO().save_checkpoint({"step": 3}, path)
        >>> AtomicCheckpointIO().load_checkpoint(path)
        {'step': 3}

    Source:
        The usual write, fsync, rename, fsync of the folder; Lightning issue 19970.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``, whole or not at all.

        Raises:
            OSError: it could not be written; an older file at ``path`` is as it was.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_atomic(path, lambda file: torch.save(checkpoint, file))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            raise OSError(
                explain(
                    f"checkpoint {os.fspath(path)} could not be written",
                    f"{error}; an older file of this name is untouched",
                    "Free some space, or choose another folder",
                )
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors and plain values from ``path``; anything else needs ``weights_only=False`` in this very call.

        The file is held against its checksums, which ``torch.load`` does not look at. In the place of a damaged one
        the newest whole checkpoint beside it is loaded, and it is said.

        Raises:
            CorruptCheckpoint: it is damaged, and there is no other.
            pickle.UnpicklingError: the file holds other objects.
        """
        if "://" not in str(path):
            path = whole_or_newest(path)
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)


class AtomicCheckpoints(Technique):
    """Write this run's checkpoints so that a crash leaves the old one or the new one, and load them safely.

    Acts on the strategy's checkpoint plugin, for the length of the run. A plugin of your own, and strategies that
    write sharded checkpoints themselves, are left alone, and it is said.

    Example:
        >>> checkpoints = AtomicCheckpoints()

    Source:
        See :class:`AtomicCheckpointIO`.
    """

    effect: ClassVar[str] = "a crash during a save never costs the last checkpoint"
    in_a_loop: ClassVar[str] = (
        "Fabric(plugins=[AtomicCheckpointIO()]), or AtomicCheckpointIO().save_checkpoint(state, path)"
    )

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
        strategy.checkpoint_io = AtomicCheckpointIO()

        def undo() -> None:
            strategy.checkpoint_io = theirs

        return undo
