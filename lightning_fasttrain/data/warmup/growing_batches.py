"""Base of the techniques that make each training batch as large as a growth allows."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L

from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.data.warmup.growth_schedule import Growth, KeepsGrowth
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.predicted_step import PredictedStep
from lightning_fasttrain.technique.run_length import steps_of_epochs, total_steps


def grow_batches(
    batches: Iterable[object], growth: Growth, window: int, change: Callable[[Any, int], object]
) -> Iterator[Any]:
    """Yield the batches, changed to ``growth.size`` while it grows; ``window`` of them are an optimizer step."""
    for number, batch in enumerate(batches, start=1):
        if growth.is_growing:
            batch = change(batch, growth.size)
        growth.add(batch)
        yield batch
        growth.agree()
        growth.steps += number % window == 0


class GrowingBatches(KeepsGrowth, Technique):
    """Changes a training batch after its transfer to the device, before any other use; validation sees it unchanged.

    Attributes:
        growth: the current ``size``, and the numbers of ``samples`` and ``tokens`` so far.
    """

    _trainer: L.Trainer | None = None

    def change(self, batch: object, size: int) -> Any:
        """Return the batch in a size below the full one."""
        raise NotImplementedError

    def predict(self, step: PredictedStep) -> None:
        """Predict with complete batches, which determine the peak."""

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self.growth.begin()
        self._trainer = trainer
        to_device = trainer.strategy.batch_to_device

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            return self._grow(trainer, batch) if trainer.training else batch

        restore = patch(trainer.strategy, "batch_to_device", batch_to_device)

        def undo() -> None:
            restore()
            self._trainer = None

        return undo

    def _grow(self, trainer: L.Trainer, batch: object) -> Any:
        growth = self.growth
        if growth.until is None:  # not in attach: the run's length is known once loaders exist
            if growth.over.unit == "share":
                steps = growth.over.amount * total_steps(trainer)
            else:
                steps = steps_of_epochs(trainer, growth.over.amount)
            growth.until = round(steps)
        growth.steps = trainer.global_step
        if growth.is_growing:
            if growth.clock != "steps":
                growth.agree(trainer.strategy, trainer.world_size)
            batch = self.change(batch, growth.size)
        growth.add(batch)
        return batch
