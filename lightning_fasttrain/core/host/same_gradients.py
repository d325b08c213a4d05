"""Whether the ranks of a run have the same parameters and gradients at each optimizer step."""

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_fasttrain.core.host.lightning import replicates, trainer_of


def has_same_gradients(module: nn.Module) -> bool:
    """Return whether a Trainer runs ``module`` under DDP on several ranks, and averages gradients in each step.

    Example:
        >>> has_same_gradients(nn.Linear(2, 2))
        False
    """
    trainer = trainer_of(module)
    if trainer is None or trainer.world_size == 1 or not replicates(trainer.strategy):
        return False
    # Local SGD averages weights now and then, and gradients never.
    return isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._model_averaging_period is None
