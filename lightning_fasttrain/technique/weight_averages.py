"""Refuse Lightning's averages of weights where they would copy the model before it has all of its parameters."""

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.technique.declarations import Conflict
from lightning_fasttrain.technique.technique import Technique


def conflict_with_early_averages(what: str) -> Conflict:
    """Return the conflict of a technique that adds parameters with ``StochasticWeightAveraging``.

    Args:
        what: the addition, such as "the adapter is added".
    """
    return Conflict(StochasticWeightAveraging, f"it copies the model before {what}", "Use WeightAveraging")


def refuse_average_before(trainer: L.Trainer, name: str, what: str) -> None:
    """Refuse a ``WeightAveraging`` callback before the first technique, since it would copy the model too early."""
    for callback in trainer.callbacks:
        if isinstance(callback, Technique):
            return
        if isinstance(callback, WeightAveraging):
            why = f"it copies the model before {what}"
            raise ValueError(explain(f"{type(callback).__name__} before {name}", why, f"List it after {name}"))
