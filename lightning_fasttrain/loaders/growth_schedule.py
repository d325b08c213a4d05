"""A size that grows over the first part of a run, by exact counts over all processes, and batches of that size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count, sum_over_ranks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.duration import LENGTHS, Length, read_length
from lightning_fasttrain.technique.run_length import steps_of_epochs, total_steps


@check_arguments(over=LENGTHS)
class Growth:
    """A size that grows from ``start`` to ``full`` in equal increments of ``grid``, each after an equal share of
    ``over``.

    A state that is saved in the body of a loop counts the batch in hand. While the size depends on samples or tokens,
    each of several processes counts those of all, and waits for them in every step.

    Args:
        start: the first size.
        full: the size after the growth.
        over: duration of the growth; see :func:`~lightning_fasttrain.loaders.read_length`.
        grid: the increment.

    Attributes:
        until: the end of the growth, in units of its clock; None while epochs or a share cannot be converted to steps.
        steps: number of optimizer steps so far.
        samples, tokens: numbers so far, as of the last synchronization of the processes.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, or do not grow; a duration that is not understood.

    Example:
        >>> growth = Growth(2, 4, over=6)
        >>> [growth.size_at(step) for step in range(8)]
        [2, 2, 2, 3, 3, 3, 4, 4]
    """

    def __init__(self, start: PositiveInt, full: PositiveInt, over: int | str | Length, grid: PositiveInt = 1) -> None:
        self.start, self.full = start, full
        self.grid, self.over = grid, read_length("over", over)
        if start > full:
            raise ValueError(explain(f"start={start} with full={full}", "the size must grow", "Use a smaller start"))
        self.clock = self.over.clock or "steps"
        self.begin()

    def begin(self) -> None:
        """Reset the counters at the start of a run."""
        known = self.over.unit not in ("share", "epochs")
        self.until: float | None = self.over.amount if known else None
        self.load_state_dict({"steps": 0, "samples": 0, "tokens": 0})

    def size_at(self, done: float) -> int:
        """Return the size after this number of steps, samples or tokens."""
        assert self.until is not None
        if done >= self.until:
            return self.full
        # The number of increments; the last one is smaller if `grid` does not divide the difference.
        sizes = -(-(self.full - self.start) // self.grid)
        return min(self.full, self.start + self.grid * int(done * sizes // self.until))

    @property
    def done(self) -> int:
        """The count so far, on the growth's clock."""
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}[self.clock]

    @property
    def size(self) -> int:
        """The current size."""
        return self.size_at(self.done)

    @property
    def is_growing(self) -> bool:
        """Whether the growth continues."""
        return self.until is None or self.done < self.until

    def begin_loop(self) -> None:
        """Count what a loop had in hand when it was left."""
        self.load_state_dict(self.state_dict())

    def add(self, batch: object) -> None:
        """Count a batch of this process, as :func:`~lightning_fasttrain.core.batch.count_batch` does."""
        samples, tokens = count_batch(batch)
        self._unsaid[0] += samples
        self._unsaid[1] += tokens

    def agree(self, world_size: int) -> None:
        """Add the new counts; on several processes, those of all of them, in one synchronous all-reduce."""
        samples, tokens = sum_over_ranks(self._unsaid, world_size)
        self._unsaid = [0, 0]
        self.samples += samples
        self.tokens += tokens

    @contextmanager
    def counting(self, steps: int) -> Iterator[None]:
        """Hand out batches that :meth:`add` has counted: the state has them at once, and the size afterwards.

        Args:
            steps: how many optimizer steps end with them.
        """
        before = self.steps, self.samples, self.tokens
        # Where nothing depends on the others' counts, processes do not wait for one another.
        self.agree(rank_count() if self.clock != "steps" and self.is_growing else 1)
        self.steps += steps
        after = self.state_dict()
        self.steps, self.samples, self.tokens = before
        self._in_hand = after
        try:
            yield
        finally:
            if self._in_hand is after:  # else another loop has begun, or a state was loaded
                self.load_state_dict(after)

    def state_dict(self) -> dict[str, int]:
        """Return the counts after the batches that a loop has in hand."""
        return self._in_hand or {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps, self.samples, self.tokens = state["steps"], state["samples"], state["tokens"]
        self._unsaid = [0, 0]  # samples and tokens of this process that the others do not know
        self._in_hand: dict[str, int] | None = None


class KeepsGrowth:
    """Saves and restores the counts of a technique's growth, over all processes."""

    growth: Growth
    _trainer: L.Trainer | None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: count the remaining samples and tokens of all processes."""
        self.growth.agree(trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        # All processes save; after an error of one of them the others may not take part.
        if self._trainer is not None and not self._trainer.interrupted:
            self.growth.agree(self._trainer.world_size)
        return self.growth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.growth.load_state_dict(state_dict)


def grow_batches(
    batches: Iterable[object], growth: Growth, window: int, change: Callable[[Any, int], object]
) -> Iterator[Any]:
    """Yield the batches, changed to ``growth.size`` while it grows; ``window`` of them are an optimizer step."""
    growth.begin_loop()
    for number, batch in enumerate(batches, start=1):
        if growth.is_growing:
            batch = change(batch, growth.size)
        growth.add(batch)
        with growth.counting(steps=int(number % window == 0)):
            yield batch


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
                growth.agree(trainer.world_size)
            batch = self.change(batch, growth.size)
        growth.add(batch)
        return batch
