"""A size that grows over the first part of a run, by what was seen: counted exactly, over all processes."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.distributed import sum_over_ranks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.technique.duration import Length, read_length


class Growth:
    """A size that grows from ``start`` to ``full`` in equal steps of ``grid``, each for an equal share of ``over``.

    Args:
        start: the first size.
        full: the size from the end of the growth on.
        over: how long it grows; see :func:`~lightning_fasttrain.data.read_length`.
        grid: what sizes grow by.

    Attributes:
        until: when the growth ends, in the numbers of its clock; None while epochs or a share are not known in steps.
        steps: of the optimizer, that are over.
        samples, tokens: that were seen, as far as the processes have told one another.

    Raises:
        TypeError, ValueError: sizes that are no whole numbers from 1, or do not grow; a length that is not understood.

    Example:
        >>> growth = Growth(2, 4, over=6)
        >>> [growth.size_at(step) for step in range(8)]
        [2, 2, 2, 3, 3, 3, 4, 4]
    """

    def __init__(self, start: int, full: int, over: int | str | Length, grid: int = 1) -> None:
        self.start, self.full = positive_int("start", start), positive_int("full", full)
        self.grid, self.over = positive_int("grid", grid), read_length("over", over)
        if start > full:
            raise ValueError(explain(f"start={start} with full={full}", "it is to grow", "Use a smaller start"))
        self.clock = self.over.clock or "steps"
        self.begin()

    def begin(self) -> None:
        """At the start of a run: nothing was seen."""
        known = self.over.unit not in ("share", "epochs")
        self.until: float | None = self.over.amount if known else None
        self.steps = self.samples = self.tokens = 0
        self._unsaid = [0, 0]  # of this process

    def size_at(self, done: float) -> int:
        """The size once so many steps, samples or tokens are over."""
        assert self.until is not None
        if done >= self.until:
            return self.full
        # How often it grows; the last time by less than `grid`, if that does not go into the difference.
        sizes = -(-(self.full - self.start) // self.grid)
        return min(self.full, self.start + self.grid * int(done * sizes // self.until))

    @property
    def done(self) -> int:
        """What is over, on its clock."""
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}[self.clock]

    @property
    def size(self) -> int:
        """The size now."""
        return self.size_at(self.done)

    @property
    def goes_on(self) -> bool:
        """Whether it is not at its end."""
        return self.until is None or self.done < self.until

    def add(self, batch: Any) -> None:
        """Count a batch of this process, as :func:`~lightning_fasttrain.core.counts.count_batch` does."""
        samples, tokens = count_batch(batch)
        self._unsaid[0] += samples
        self._unsaid[1] += tokens

    def agree(self, strategy: Strategy | None = None, world_size: int = 1) -> None:
        """Add what was counted since; on several processes what all of them did, in one all-reduce that is awaited."""
        samples, tokens = sum_over_ranks(self._unsaid, strategy, world_size)
        self._unsaid = [0, 0]
        self.samples += samples
        self.tokens += tokens

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps, self.samples, self.tokens = state["steps"], state["samples"], state["tokens"]
        self._unsaid = [0, 0]
