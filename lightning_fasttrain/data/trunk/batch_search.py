"""Find how the step of a batch is split: its loss, by weights that are read, or otherwise its model, at the trunk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_fasttrain.core.distributed import from_all_ranks, rank_count
from lightning_fasttrain.core.messages import say, warn
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_split
from lightning_fasttrain.data.trunk.find_trunk import find_trunk_of
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk

TRIES = 4  # earlier split, this batch's split, that without the counting rule, trunk
OUT_OF_TRIES = "its micro-batches have other normalizers than those found from this batch"


Found = LossSplit | Trunk | None


def prefer_what_shows_something(found: Found, before: Found) -> Found:
    """Return the split that a batch shows, unless it shows nothing, as without targets."""
    shows_nothing = found is None or (isinstance(found, LossSplit) and found.provisional)
    return before if shows_nothing and before is not None else found


@dataclass
class BatchSearch:
    """Finds how the step of one batch is split.

    Args:
        who: the technique's name, for log lines.
        stage: the stage on which the step runs.
        batch: the batch on which it runs.
        n: number of micro-batches.
        samples: yields a few samples of the batch.
        find_split: maps whether all ranks call it to how the loss is split; raises :class:`CannotSplitError`.
        may_use_trunk: whether the trunk may be used if the loss cannot be split; otherwise that error is raised.
    """

    who: str
    stage: Stage
    batch: Any
    n: int
    samples: Callable[[], Iterator[Sample]]
    find_split: Callable[[bool], LossSplit | None]
    may_use_trunk: bool

    def find(self, *, together: bool) -> Found:
        """Return how the step is split; None where the step returned None, so that nothing is known yet.

        Args:
            together: whether all ranks call this; then all use the common result.

        Raises:
            CannotSplitError: it cannot be split.
        """
        try:
            return self.find_split(together)
        except CannotSplitError as error:
            return self._find_trunk(error, together)

    def find_another(self, before: LossSplit, error: OtherSplitError, attempt: int) -> LossSplit | Trunk:
        """Return a split for a batch whose loss is not split like earlier ones. Other ranks do not take part.

        Args:
            before: the split of earlier batches.
            error: the mismatch.
            attempt: the number of earlier calls for this batch.

        Raises:
            CannotSplitError: the loss cannot be split, or not without the other ranks.
        """
        if not self.stage.gradients and rank_count() > 1:
            why = f"{error}, and with sharded parameters a single rank cannot run a batch again"
            raise CannotSplitError(why)
        if attempt == 0:
            found = self.find(together=False)
            if found is not None and found != before:
                return found
        if before.count is not None and before.read is not None and self.stage.may_scale:
            return replace(before, count=None)  # the counting rule does not match, so only the graph is read
        return self._find_trunk(CannotSplitError(f"{error}", try_split(self.stage, self.samples())), together=False)

    def _find_trunk(self, error: CannotSplitError, together: bool) -> Trunk | LossSplit:
        """Return the trunk, or otherwise a likely counting rule, with a warning."""
        if not self.may_use_trunk:
            raise error
        found = find_trunk_of(self.stage, error.trial, self.batch, self.n)
        named = sorted(found.modules) if isinstance(found, Trunk) else found
        others = from_all_ranks([named]) if together else []
        unlike = next((other for other in others if other != named), None)
        if unlike is not None:
            found = f"on another rank: {unlike}"
        if isinstance(found, Trunk):
            say_trunk(self.who, found, f"since {error.why}")
            return found
        if error.otherwise is None:
            raise CannotSplitError(f"{error.why}, and {found}", error.trial) from None
        warn(f"{self.who}: {error.why}; {found}. So each micro-batch is weighted by {error.otherwise}")
        return error.otherwise


def say_trunk(who: str, trunk: Trunk, why: str) -> None:
    say(
        "%s: %s runs in micro-batches with recomputation (one additional forward), and the loss sees the whole "
        "batch, %s",
        who,
        trunk,
        why,
    )
