"""Find, from a few samples, how the micro-batches of a loss are weighted, and check that the loss can be split."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.core.messages import explain, list_some, say, warn
from lightning_fasttrain.data.normalizer.classify_terms import (
    classify_alone,
    classify_terms,
    list_rules,
    match_rules,
)
from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule
from lightning_fasttrain.data.normalizer.log_rules import find_log_rules
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, ReadNormalizer
from lightning_fasttrain.data.normalizer.trial.runs import FLOAT64, LOW_PRECISION, Trial
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample, list_altered
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_in_float64, try_split

_SURE = 1e-5  # float32 rounding is nearly always below; larger errors are checked in float64
_STATISTICS = "BatchNorm in training mode uses the statistics of the samples that run together"


class CannotSplitError(ValueError):
    """A loss that is not a weighted sum of its micro-batches' losses.

    Attributes:
        why: the reason, as a clause.
        trial: the trial that showed it; None where the step was not tried.
        otherwise: a split of the samples' loss that would work if the step did nothing else.
    """

    def __init__(self, why: str, trial: Trial | None = None, otherwise: LossSplit | None = None):
        self.why, self.trial, self.otherwise = why, trial, otherwise
        what = "MicroBatching cannot split this loss exactly"
        way_out = (
            "Name the submodule in which samples do not depend on one another, with through=, give count= a function "
            "(of a batch: the number of terms its loss averages over), or use ActivationCheckpointing for memory"
        )
        super().__init__(explain(what, why, way_out))


def find_split(
    stage: Stage,
    samples: Iterator[Sample],
    count: Count,
    *,
    check: bool,
    preferred: CountRule | None = None,
    together: bool = True,
    whole_batches: bool = False,
) -> LossSplit | None:
    """Return how the loss of a step on a given stage is split; ``preferred`` is the counting rule that is tried first.

    Args:
        together: whether all ranks call this, and reach the same decision.
        whole_batches: whether complete batches are summed, each with its own statistics.

    Returns:
        The split; None where the step returned None, so that nothing could be found yet.

    Raises:
        CannotSplitError: the loss is not a weighted sum of its micro-batches' losses.
    """
    if callable(count) and not check:
        return LossSplit(None, count)
    trial = try_split(stage, samples)
    verdict = _judge(trial, count, preferred)
    if verdict.is_unsure:
        trial = try_in_float64(stage, trial)
        verdict = _judge(trial, count, preferred)
    # What fits these samples may do so by chance, such as full masks: it must fit altered ones, too.
    altered = _try_altered(verdict, trial, stage)
    verdict = _judge_altered(verdict, altered)
    if not whole_batches:
        verdict = replace(verdict, statistics=list_some(trial.statistics))
        if trial.splits:
            verdict = replace(verdict, changed=trial.whole.changed)
    # Ranks that split a batch in different ways would wait for one another.
    if together:
        verdict = _worst(from_all_ranks([verdict]))
    split = _conclude(verdict, trial, count, check, stage.may_scale)
    if split is None:
        return None
    counted = split.count_in(trial.whole) if split.read is not None else None
    if counted is not None and counted > 0:
        split.per_sample = counted / trial.sample.size
    split.leaves = tuple(map(weakref.ref, trial.parameters))
    split.log_rules = find_log_rules(split, [trial, *altered])
    return split


@dataclass(frozen=True)
class _Verdict:
    """The result of one rank, which is sent to the others.

    Attributes:
        read: the normalizer that was read from the loss; None where there is none, or a given rule is checked.
        rules: the counting rules that reproduce it, the likeliest first, and its ratio to each.
        why_not: why the loss cannot be split that way; empty if it can.
        error: the error of the split.
        limit: the largest error that counts as rounding.
        checked: whether gradients or losses were compared.
        skipped: whether the step returned None.
        failed: whether the step cannot run on a few samples.
        shows_nothing: whether the samples have no finite loss or no gradient, so that others must be tried.
        statistics: the layers that use statistics of the batch; empty if none does.
        changed: the buffers that the step changes.
    """

    read: ReadNormalizer | None = None
    rules: dict[CountRule, float] = field(default_factory=dict)
    why_not: str = ""
    error: float = float("inf")
    limit: float = _SURE
    checked: bool = True
    skipped: bool = False
    failed: bool = False
    shows_nothing: bool = False
    statistics: str = ""
    changed: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the gradients matched."""
        return self.checked and not self.why_not and self.error <= self.limit

    @property
    def is_unsure(self) -> bool:
        """Whether float64 could distinguish rounding from a real difference."""
        largest = 0.3 if self.limit == LOW_PRECISION else 1e-2
        return self.checked and self.limit > FLOAT64 and _SURE < self.error <= largest


def _judge(trial: Trial, count: Count, preferred: CountRule | None) -> _Verdict:
    if trial.why_not:
        read = None if callable(count) else _guess_normalizer(trial)
        return _Verdict(
            read,
            why_not=trial.why_not,
            checked=False,
            skipped=trial.is_skipped,
            failed=trial.failed,
            shows_nothing=trial.shows_nothing,
        )
    if callable(count):
        return _Verdict(error=trial.error(LossSplit(None, count).list_weights), limit=trial.limit)
    read = classify_terms(trial)
    if isinstance(read, str):
        return _Verdict(why_not=read)
    error = trial.error(LossSplit(read, None).list_weights)
    return _Verdict(read, match_rules(read, trial, preferred), error=error, limit=trial.limit)


def _guess_normalizer(trial: Trial) -> ReadNormalizer | None:
    """Return the likely normalizer where gradients cannot be compared, as far as the graph shows one."""
    if not trial.splits:
        return classify_alone(trial.whole)
    read = classify_terms(trial)
    if isinstance(read, str):
        return None
    # Without targets, no divisor differs from sample to sample.
    return (classify_alone(trial.whole) or read) if read.term is None else read


def _try_altered(verdict: _Verdict, trial: Trial, stage: Stage) -> list[Trial]:
    """Run the step on the same samples with other weights, masks and labels, where this adds information."""
    if verdict.read is None or not verdict.is_right or not stage.gradients:
        return []
    ignored = {term.ignored for term in trial.whole.terms}
    # A plain cross_entropy; for any other loss, labels that it does not ignore may be out of range.
    samples = list_altered(trial.sample, ignored.pop() if len(ignored) == 1 else None)
    tried = [try_split(stage, iter([sample]), trial.precision) for sample in samples]
    # A step may fail on such values.
    return [altered for altered in tried if not altered.why_not and altered.precision == trial.precision]


def _judge_altered(verdict: _Verdict, altered: Sequence[Trial]) -> _Verdict:
    """Check the verdict on the samples with other weights, masks and labels."""
    for trial in altered:
        other = _judge(trial, "auto", None)
        if not other.is_right:
            why = other.why_not or "samples of a batch depend on one another if their weights or masks differ"
            return _Verdict(why_not=why, limit=verdict.limit)
    return verdict


def _worst(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Return the worst verdict of all ranks that could compare anything, with the rules that hold on all of them."""
    checked = [verdict for verdict in verdicts if verdict.checked]
    checked = checked or [verdict for verdict in verdicts if verdict.read is not None]
    if not checked:
        return next((verdict for verdict in verdicts if not verdict.skipped), verdicts[0])
    # Errors in different precisions are compared by how far they are from their limits.
    worst = max(checked, key=lambda verdict: (bool(verdict.why_not), verdict.error / verdict.limit))
    rules = dict(worst.rules)
    for verdict in checked:
        rules = {rule: scale for rule, scale in rules.items() if rule in verdict.rules}
    return replace(worst, rules=rules)


def _conclude(verdict: _Verdict, trial: Trial, count: Count, check: bool, may_scale: bool) -> LossSplit | None:
    """Return the split that a verdict allows. Raises: CannotSplitError: it allows none."""
    if verdict.skipped:
        return None
    _refuse_what_cannot_be_split(verdict, trial, is_given=callable(count), check=check)
    if not verdict.checked:
        return _choose_unchecked(verdict, trial, count)
    error = verdict.error
    if callable(count):
        split = LossSplit(None, count)
    elif verdict.read is not None:
        split = LossSplit(verdict.read, None)
        if verdict.rules:
            rule, scale = next(iter(verdict.rules.items()))
            split = LossSplit(verdict.read, rule, scale)
    elif check:
        raise CannotSplitError(verdict.why_not, trial)
    else:
        # The loss hides its normalizers; of all rules, the nearest is taken.
        splits = [LossSplit(None, rule) for rule in list_rules(trial)]
        split = min(splits, key=lambda one: trial.error(one.list_weights))
        error = trial.error(split.list_weights)
    if verdict.is_right:
        accepts_changes = callable(count) or not check
        _refuse_what_this_step_cannot_use(split, verdict, trial, may_scale, accepts_changes)
        _say_found(split, error, trial)
    elif check:
        why = f"the micro-batches' gradients differ from that of the unsplit samples by {error:.2g}"
        if callable(count):
            raise CannotSplitError(f"count= does not split this loss exactly: {why}", trial)
        raise CannotSplitError(f"{why}, weighted by {split}: samples of a batch depend on one another", trial)
    else:
        warn(f"each micro-batch is weighted by {split}, with an error of {error:.1%}, which changes the training")
    return split


def _refuse_what_this_step_cannot_use(
    split: LossSplit, verdict: _Verdict, trial: Trial, may_scale: bool, accepts_changes: bool
) -> None:
    """Raises: CannotSplitError: the total must be known beforehand and is not, or each micro-batch changes buffers."""
    if split.count is None and not split.is_sum and not may_scale:
        why = f"no rule counts {split} beforehand, and this strategy sums gradients before they can be scaled"
        raise CannotSplitError(why, trial)
    if verdict.changed and not accepts_changes:
        changed = list_some(list(map(repr, verdict.changed)))
        raise CannotSplitError(f"the step changes {changed}, and would change them in each micro-batch", trial, split)


def _refuse_what_cannot_be_split(verdict: _Verdict, trial: Trial, is_given: bool, check: bool) -> None:
    """Raises: CannotSplitError: layers use statistics of the batch, or the step does not run on a few samples."""
    if verdict.statistics and check:
        raise CannotSplitError(f"{_STATISTICS} ({verdict.statistics})", trial)
    if verdict.statistics:
        warn(f"{_STATISTICS} ({verdict.statistics}), which changes the training")
    if verdict.failed and check and not is_given:
        raise CannotSplitError(verdict.why_not, trial)


def _choose_unchecked(verdict: _Verdict, trial: Trial, count: Count) -> LossSplit:
    """Choose a split where no rank could compare gradients: the normalizer read, or the rule that fits most models."""
    if callable(count):
        warn(f"micro-batches are weighted by count=, unchecked: {trial.why_not}")
        return LossSplit(None, count)
    if verdict.read is not None:
        split = LossSplit(verdict.read, None, provisional=verdict.shows_nothing)
        say("each micro-batch is weighted by %s; gradients were not compared: %s", split, trial.why_not)
        return split
    first = CountRule("samples" if find_labels(trial.sample.whole)[1] is None else "targets")
    warn(
        f"each micro-batch is weighted by {first}, unchecked: {trial.why_not}. "
        "Give count= if the loss averages over something else."
    )
    return LossSplit(None, first, provisional=verdict.shows_nothing)


def _say_found(split: LossSplit, error: float, trial: Trial) -> None:
    what = "gradient" if trial.parameters else "loss"
    say(
        "MicroBatching: each micro-batch is weighted by %s. Checked on %d samples: the %s matches the unsplit batch "
        "to %.0e",
        split,
        trial.sample.size,
        what,
        error,
    )
