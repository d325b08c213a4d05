"""One rung's training run, in the two hosts that the ladder compares: ``L.Trainer`` and a bare loop."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fasttrain import data, optim
from lightning_fasttrain.bench.gpt import GPTModule
from lightning_fasttrain.bench.ladder.recorder import Recorder
from lightning_fasttrain.bench.ladder.results import State
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.planner.catalogue import class_named
from lightning_fasttrain.technique import Technique, apply


def callbacks_of(state: State) -> list[L.Callback]:
    """The callbacks that a state names, each a public name of this package.

    Raises:
        ValueError: there is nothing of that name.

    Example:
        >>> [type(callback).__name__ for callback in callbacks_of({"callbacks": {"MicroBatching": {"n": 2}}})]
        ['MicroBatching']
    """
    return [_make(name, arguments) for name, arguments in state["callbacks"].items()]


def _make(name: str, arguments: dict[str, Any]) -> Any:
    values = {}
    for key, value in arguments.items():
        values[key] = _make(*next(iter(value.items()))) if isinstance(value, dict) else value
    return class_named(name)(**values)


class Record(L.Callback):
    """Hands a Trainer's steps to a :class:`Recorder`. Listed last, so that every other callback's work is inside."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: right before the step."""
        self.recorder.begin(batch_idx, pl_module, *trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped and the loss of the step is known."""
        self.recorder.end(batch_idx, outputs["loss"])  # Lightning makes a dict of whatever training_step returns


def run_in_trainer(
    module: GPTModule, loader: Iterable[Any], state: State, recorder: Recorder, folder: str
) -> list[L.Callback]:
    """Train with ``L.Trainer`` for ``recorder.steps`` steps.

    Returns:
        The callbacks of the state, for what they report after the run.
    """
    callbacks = callbacks_of(state)
    trainer = L.Trainer(
        accelerator="gpu" if recorder.device.type == "cuda" else "cpu",
        devices=1,
        max_steps=recorder.steps,
        callbacks=[*callbacks, Record(recorder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **state["trainer"],
    )
    trainer.fit(module, loader)
    return callbacks


def run_in_a_bare_loop(module: GPTModule, loader: Iterable[Any], state: State, recorder: Recorder) -> list[L.Callback]:
    """Train with the same techniques as plain functions: what a Trainer costs is the difference.

    Returns:
        The callbacks of the state, for what they report after the run.

    Raises:
        ValueError: a technique of the state has no function that this loop calls.
    """
    callbacks = callbacks_of(state)
    names = {type(callback).__name__ for callback in callbacks}
    parts = state["callbacks"].get("MicroBatching", {}).get("n", 1)
    device = recorder.device
    bf16 = state["trainer"].get("precision") == "bf16-mixed"
    surgeons = [c for c in callbacks if isinstance(c, Technique) and type(c).apply is not Technique.apply]
    known = {"MicroBatching", "DevicePrefetch", "EagerGradientRelease", "OptimizerInBackward"}
    unknown = names - known - {type(c).__name__ for c in surgeons}
    if unknown:
        why = "it has no place in it yet"
        raise ValueError(explain(f"{', '.join(sorted(unknown))} in a bare loop", why, "Add it to training_loops.py"))
    with apply(module, surgeons):
        module.to(device)
        optimizer = module.configure_optimizers()
        if "OptimizerInBackward" in names:
            optim.optimize_in_backward_(optimizer)
        batches = data.prefetch_to_device(loader, device) if "DevicePrefetch" in names else loader

        def loss_of(batch: Any) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):  # as in the Trainer
                return module.loss(batch)

        for step, batch in enumerate(batches):
            batch = [part.to(device, non_blocking=True) for part in batch]
            recorder.begin(step, module, optimizer, batch)
            loss = data.accumulate_gradients(loss_of, batch, parts)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recorder.end(step, loss)
    return callbacks
