"""Find how the step of a batch is split: its loss, by weights that are read, or otherwise its model, at the trunk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut
from lightning_fasttrain.core.distributed import from_all_ranks, rank_count
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule, count_targets
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError, find_split
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample, first_micro_batch, sample_rows
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_split
from lightning_fasttrain.data.split_batch import split_batch
from lightning_fasttrain.data.trunk.find_trunk import find_trunk
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk

TRIES = 4  # earlier split, this batch's split, that without the counting rule, trunk
OUT_OF_TRIES = "its micro-batches have other normalizers than those found from this batch"


Found = LossSplit | Trunk


def guess_split() -> LossSplit:
    """Return the split that is used as long as no batch has shown one."""
    return LossSplit(None, count_targets, provisional=True)


def is_guess(found: Found) -> bool:
    """Whether no batch has shown how the step is split, as without targets."""
    return isinstance(found, LossSplit) and found.provisional


@dataclass(frozen=True)
class BatchSearch:
    """Finds how the step of one batch is split.

    Attributes:
        stage: the stage on which the step runs.
        batch: the batch on which it runs.
        n: number of micro-batches.
        split: how a batch is split, where it is a function of the user's.
        count: the given counting rule, or ``"auto"``.
        check: whether a split that would change the training is refused.
        preferred: the counting rule that is tried first.
        is_window: whether several batches are summed: then a trunk, which cannot run them as one, is not used.
        whole_batches: whether these batches run unsplit, each with its own statistics.
    """

    stage: Stage
    batch: Any
    n: int
    split: Callable[[Any, int], list[Any]] = split_batch
    count: Count = "auto"
    check: bool = True
    preferred: CountRule | None = None
    is_window: bool = False
    whole_batches: bool = False

    def find(self, before: Found, *, together: bool = True) -> Found:
        """Return how the step is split.

        Args:
            before: the split of earlier batches, which is kept where this one shows nothing.
            together: whether all ranks call this, and use the common result.

        Raises:
            CannotSplitError: it cannot be split.
        """
        log_rules = getattr(before, "log_rules", None)
        try:
            found = find_split(
                self.stage,
                self.samples(),
                self.count,
                check=self.check,
                preferred=self.preferred,
                log_rules=log_rules,
                together=together,
                whole_batches=self.whole_batches,
            )
        except CannotSplitError as error:
            return self._find_trunk(error, together)
        if found is None or (found.provisional and not is_guess(before)):
            return before
        return found

    def samples(self) -> Iterator[Sample]:
        """Yield a few samples of the batch; where the user's function splits it, its first micro-batch."""
        if self.split is not split_batch:
            return first_micro_batch(self.batch, self.n, self.split)
        if self.whole_batches and not can_be_cut(self.batch):
            # There is nothing to compare, but the losses that the step computes may show the rule.
            return iter([Sample(self.batch, 1, [])])
        return sample_rows(self.batch, -(-batch_size(self.batch) // self.n))

    def find_another(self, before: LossSplit, error: OtherSplitError, attempt: int) -> Found:
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
            found = self.find(before, together=False)
            if found != before:
                return found
        if before.count is not None and before.read is not None and self.stage.may_scale:
            return replace(before, count=None)  # the counting rule does not match, so only the graph is read
        return self._find_trunk(CannotSplitError(f"{error}", try_split(self.stage, self.samples())), together=False)

    def _find_trunk(self, error: CannotSplitError, together: bool) -> Found:
        """Return the trunk, or otherwise a likely counting rule, with a warning."""
        if self.is_window and not self.whole_batches and self.count == "auto":
            what = "micro-batches of a window of several batches, as with TokenWeightedAccumulation"
            why = f"{error.why}, and the samples of several batches are never in memory together"
            way_out = "Use larger batches in more micro-batches, or give count= a function"
            raise ValueError(explain(what, why, way_out)) from None
        if self.is_window or self.count != "auto":
            raise error
        found = find_trunk(self.stage, error.trial, self.batch, self.n)
        named = sorted(found.modules) if isinstance(found, Trunk) else found
        if together:
            for other in from_all_ranks([named]):
                if other != named:
                    found = f"on another rank: {other}"
                    break
        if isinstance(found, Trunk):
            say_trunk(found, f"since {error.why}")
            return found
        if error.otherwise is None:
            raise CannotSplitError(f"{error.why}, and {found}", error.trial) from None
        warn(f"MicroBatching: {error.why}; {found}. So each micro-batch is weighted by {error.otherwise}")
        return error.otherwise


def say_trunk(trunk: Trunk, why: str) -> None:
    what = "runs in micro-batches with recomputation (one additional forward), and the loss sees the whole batch"
    say("MicroBatching: %s %s, %s", trunk, what, why)
