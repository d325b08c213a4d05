"""Track the last checkpoint that a run saved, and restore it without ending the run."""

import os
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fasttrain.core.host.lightning import call_module
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all


class LastCheckpoint:
    """The newest complete checkpoint of a run, with weights, optimizers and schedules.

    Attributes:
        path: its file; "" if there is none.
        step: the optimizer step after which it was saved.
    """

    def __init__(self) -> None:
        self.path, self.step = "", 0

    def watch(self, trainer: L.Trainer) -> Undo:
        """Track the checkpoints that this run saves, until undone."""
        strategy = trainer.strategy
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: str | Path, *args: object, **kwargs: object) -> None:
            save(checkpoint, filepath, *args, **kwargs)
            if "optimizer_states" in checkpoint:  # absent with save_weights_only
                self.path, self.step = os.fspath(filepath), checkpoint["global_step"]

        def remove_checkpoint(filepath: str | Path) -> None:
            remove(filepath)
            # ModelCheckpoint keeps only the best ones, and may remove this one.
            if os.fspath(filepath) == self.path:
                self.path = ""

        changed = {"save_checkpoint": save_checkpoint, "remove_checkpoint": remove_checkpoint}
        return patch_all(strategy, changed)

    def begin(self, trainer: L.Trainer) -> None:
        """Start with the checkpoint that the run was resumed from, if any."""
        self.path, self.step = os.fspath(trainer.ckpt_path or ""), trainer.global_step

    def go_back(self, trainer: L.Trainer) -> None:
        """Restore weights, optimizers and schedules; loops, loaders and callbacks keep their state."""
        strategy, module = trainer.strategy, trainer.lightning_module
        checkpoint = strategy.load_checkpoint(self.path, weights_only=True)
        # In Lightning's order: the hook may change what is then loaded.
        call_module(trainer, "on_load_checkpoint", checkpoint)
        strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
