"""Small state that affects how a run continues, and that Lightning does not save in checkpoints."""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fasttrain.core.host.lightning import last_save, set_last_save


def forgotten_state(trainer: L.Trainer) -> dict[str, Any]:
    """Return this state as plain values; it is the same on all processes."""
    saves = {}
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            saves[callback.state_key] = [*last_save(callback), _on_cpu(callback.current_score)]
    reloaded = [getattr(*loop) for loop in _reloading_loops(trainer)]
    return {"should_stop": trainer.should_stop, "reloaded": reloaded, "saves": saves}


def restore_forgotten(trainer: L.Trainer, state: dict[str, Any]) -> None:
    """Restore the state that :func:`forgotten_state` returned."""
    trainer.should_stop = trainer.should_stop or state["should_stop"]  # a stop may have been requested since
    for loop, epoch in zip(_reloading_loops(trainer), state["reloaded"], strict=True):
        setattr(*loop, epoch)
    path = os.path.abspath(str(trainer.ckpt_path))
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in state["saves"]:
            step, last, callback.current_score = state["saves"][callback.state_key]
            # `last_model_path` and the like are set before the file is written, the two below after it.
            made = {callback.last_model_path, callback.best_model_path, *callback.best_k_models} - {""}
            if path in {os.path.abspath(name) for name in made}:  # saved during this very save, which succeeded
                step, last = trainer.global_step, path
            set_last_save(callback, step, last)


def _reloading_loops(trainer: L.Trainer) -> list[tuple[object, str]]:
    """With ``reload_dataloaders_every_n_epochs``: the loops and attributes that hold the epoch of the last reload."""
    fit_loop = trainer.fit_loop
    return [(fit_loop, "_last_train_dl_reload_epoch"), (fit_loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch")]


# The score is on the saving rank's device, which the resumed run may not have.
def _on_cpu(score: torch.Tensor | None) -> torch.Tensor | None:
    return score.detach().cpu() if isinstance(score, torch.Tensor) else score
