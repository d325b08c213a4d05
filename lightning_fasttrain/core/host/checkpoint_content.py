"""Take a Trainer's checkpoint without a file, and have a Trainer resume from one."""

import os
from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, patched

Found = tuple[str | os.PathLike[str], dict[str, Any]]


def checkpoint_content(trainer: L.Trainer) -> dict[str, Any]:
    """Return what ``trainer.save_checkpoint`` gives to the strategy to write; all ranks must call it."""
    taken: list[dict[str, Any]] = []
    with patched(trainer.strategy, "save_checkpoint", lambda checkpoint, *_, **__: taken.append(checkpoint)):
        trainer.save_checkpoint("", weights_only=False)
    return taken[0]


def resume_from_content(trainer: L.Trainer, find: Callable[[], Found | None]) -> Undo:
    """Have ``fit`` resume from the checkpoint that ``find`` returns with its path, instead of its ``ckpt_path``.

    ``find`` is called when Lightning would load a checkpoint. If it returns None, ``ckpt_path`` is loaded.
    """
    connector = trainer._checkpoint_connector
    load_given = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        found = find()
        if found is None:
            load_given(checkpoint_path, *args, **kwargs)
            return
        path, content = found
        with patched(trainer.strategy, "load_checkpoint", lambda *_, **__: content):
            load_given(str(path), *args, **kwargs)

    return patch(connector, "resume_start", resume_start)
