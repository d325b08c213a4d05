"""Whether a checkpoint is one of this very run: what must agree for the run to go on as it would have."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_fasttrain._messages import explain


def settings_of(trainer: L.Trainer, loaders: list[Any]) -> dict[str, Any]:
    """Plain values under names that an error can show; None where there is nothing to compare."""
    scheduled = any(
        isinstance(callback, GradientAccumulationScheduler) or type(callback).__name__ == "TokenWeightedAccumulation"
        for callback in trainer.callbacks
    )
    return {
        "processes": trainer.world_size,
        "accumulate_grad_batches": None if scheduled else trainer.accumulate_grad_batches,
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers] or None,
        "loaders": [None if loader is None else about_loader(loader) for loader in loaders],
    }


def about_loader(loader: Any) -> dict[str, Any]:
    """The same about one training loader."""
    dataset = getattr(loader, "dataset", loader)
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        samples = None
    sampler = getattr(loader, "batch_sampler", None)
    return {
        "samples in the training data": samples,
        "batch size": getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None),
    }


def disagreements(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What to say of each setting of which both sides know another value."""
    for name in sorted((then.keys() & now.keys()) - {"loaders"}):
        if then[name] is not None and now[name] is not None and then[name] != now[name]:
            yield explain(
                f"the checkpoint was saved with {name} = {then[name]}, this run has {now[name]}",
                "so it cannot go on as it would have",
                "Make it as it was, or accept another run: ExactResume(strict=False)",
            )
