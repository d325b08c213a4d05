"""Find, from a few samples, how the micro-batches of a loss are weighted, and check that the loss can be split."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.core.messages import explain, list_some, say, warn
from lightning_fasttrain.data.normalizer.classify_terms import (
    classify_alone,
    classify_terms,
    error_of_read,
    error_of_rule,
    list_rules,
    read_count,
    rules_that_give,
    scale_of,
)
from lightning_fasttrain.data.normalizer.count_targets import (
    Count,
    CountRule,
    CountTargets,
)
from lightning_fasttrain.data.normalizer.split_rule import LossSplit
from lightning_fasttrain.data.normalizer.trial.runs import relative_difference
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample, list_altered
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, Trial, try_split
from lightning_fasttrain.data.normalizer.try_log_rules import find_log_rules_of

_SURE = 1e-5  # float32 rounding is nearly always below; larger errors are checked in float64
_FLOAT32 = 1e-3
_ROUNDED = 5e-2  # for low-precision operations that float64 cannot replace
_FLOAT64 = 1e-6  # a step may itself round some tensors to float32
_ALL_FLOAT64 = 1e-9
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
    facts: dict[str, Any] = {"failed": trial.failed, "shows_nothing": trial.shows_nothing}
    if not whole_batches:
        changed = trial.splits[0].whole.changed if trial.splits else ()
        facts |= {"statistics": _name_statistics(trial, stage), "changed": changed}
    verdict = _judge(trial, count, preferred)
    if verdict.is_unsure:
        trial = try_in_float64(stage, trial)
        verdict = _judge(trial, count, preferred)
    altered = _try_altered(verdict, trial, stage)
    verdict = replace(_judge_altered(verdict, altered), **facts)
    if together:
        # A user's function may not be picklable; every rank has it anyway.
        own = {"split": verdict.split, "rules": verdict.rules} if callable(count) else {}
        sent = replace(verdict, split=None, rules=()) if callable(count) else verdict
        verdict = replace(_worst(from_all_ranks([sent])), **own)
    split = _conclude(verdict, trial, count, check, stage.may_scale)
    if split is None or trial.whole is None:
        return split
    leaves = tuple(map(weakref.ref, trial.splits[0].parameters)) if trial.splits else ()
    per_sample, log_rules = _count_per_sample(split, trial), find_log_rules_of(split, [trial, *altered])
    return replace(split, leaves=leaves, per_sample=per_sample, log_rules=log_rules)


def try_in_float64(stage: Stage, trial: Trial) -> Trial:
    """Return a trial in float64, which distinguishes rounding from a real difference; the given one where it fails."""
    precise = try_split(stage, iter([trial.sample]), "float64")
    if not precise.precise or precise.why_not:
        return trial
    # It must change rounding alone: kernels of quantized layers, for instance, do not support it.
    one, other = trial.splits[0].whole.everything, precise.splits[0].whole.everything
    return precise if one.shape == other.shape and relative_difference(one, other) <= 0.1 else trial


def _name_statistics(trial: Trial, stage: Stage) -> str:
    if not trial.statistics:
        return ""
    names = []
    for model in stage.models:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.training:
                names.append(repr(name))
    return list_some(names)


@dataclass(frozen=True)
class _Verdict:
    """The result of one rank.

    Attributes:
        split: the best split that was found; None if there was none.
        rules: the counting rules that reproduce the read normalizer, or the given one; the likeliest first.
        why_not: why the loss cannot be split that way; empty if it can.
        error: the error of the best split.
        limit: the largest error that counts as rounding.
        checked: whether gradients or losses were compared.
        skipped: whether the step returned None.
        statistics: the layers that use statistics of the batch; empty if none does.
        changed: the buffers that the step changes.
        failed: whether the step cannot run on a few samples.
        shows_nothing: whether the samples have no finite loss or no gradient, so that others must be tried.
    """

    split: LossSplit | None = None
    rules: tuple[CountTargets, ...] = ()
    why_not: str = ""
    error: float = float("inf")
    limit: float = _SURE
    checked: bool = True
    skipped: bool = False
    statistics: str = ""
    changed: tuple[str, ...] = ()
    failed: bool = False
    shows_nothing: bool = False

    @property
    def is_unsure(self) -> bool:
        """Whether float64 could distinguish rounding from a real difference."""
        ambiguous = _SURE < self.error <= (0.3 if self.limit == _ROUNDED else 1e-2)
        return self.checked and not self.skipped and ambiguous and self.limit not in (_FLOAT64, _ALL_FLOAT64)


def _judge(trial: Trial, count: Count, preferred: CountRule | None) -> _Verdict:
    if trial.is_skipped:
        return _Verdict(skipped=True, checked=False)
    if callable(count):
        if trial.why_not:
            return _Verdict(LossSplit(None, count), (count,), trial.why_not, checked=False)
        return _Verdict(LossSplit(None, count), (count,), "", error_of_rule(count, trial), error_limit(trial))
    if not trial.splits:
        alone = None if trial.whole is None else classify_alone(trial.whole)
        split = None if alone is None else LossSplit(alone, None)
        return _Verdict(split, why_not=trial.why_not, checked=False)
    read = classify_terms(trial.splits)
    if isinstance(read, str):
        return _Verdict(None if trial.why_not else LossSplit(None, None), why_not=read, checked=not trial.why_not)
    if trial.why_not:
        likely = classify_alone(trial.splits[0].whole) if read.term is None else read
        split = LossSplit(likely or read, None, provisional=trial.shows_nothing)
        return _Verdict(split, why_not=trial.why_not, checked=False)
    error = max(error_of_read(read, split, trial) for split in trial.splits)
    rules = rules_that_give(read, trial, preferred)
    return _Verdict(LossSplit(read, None), tuple(rules), "", error, error_limit(trial))


def _try_altered(verdict: _Verdict, trial: Trial, stage: Stage) -> list[Trial]:
    """Run the step on the same samples with other weights, masks and labels, where this adds information."""
    is_right = verdict.checked and not verdict.why_not and verdict.error <= verdict.limit
    if not is_right or not stage.gradients or verdict.split is None or verdict.split.read is None:
        return []
    samples = list_altered(trial.sample, _ignored(trial))
    tried = [try_split(stage, iter([sample]), trial.precision) for sample in samples]
    # A step may fail on such values.
    return [altered for altered in tried if not altered.why_not and altered.precision == trial.precision]


def _ignored(trial: Trial) -> int | None:
    """Return the ``ignore_index`` of a loss that is a plain cross_entropy; None for any other loss."""
    ignored = {term.ignored for term in trial.splits[0].whole.terms}
    return ignored.pop() if len(ignored) == 1 else None


def _judge_altered(verdict: _Verdict, altered: Sequence[Trial]) -> _Verdict:
    """Check the verdict on the samples with other weights, masks and labels."""
    for trial in altered:
        other = _judge(trial, "auto", None)
        if other.split is None or other.split.read is None or other.error > other.limit:
            why = other.why_not or "samples of a batch depend on one another if their weights or masks differ"
            return replace(verdict, split=LossSplit(None, None), why_not=why, error=float("inf"), rules=())
    return verdict


def _worst(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Return the worst verdict of all ranks that could compare anything, with the rules that hold on all of them."""
    checked = [verdict for verdict in verdicts if verdict.checked]
    checked = checked or [verdict for verdict in verdicts if verdict.split is not None]
    if not checked:
        return next((verdict for verdict in verdicts if not verdict.skipped), verdicts[0])
    worst = max(checked, key=lambda verdict: (bool(verdict.why_not), verdict.error / verdict.limit))
    common = set[CountTargets](worst.rules).intersection(*[verdict.rules for verdict in checked])
    return replace(worst, rules=tuple(rule for rule in worst.rules if rule in common))


def _conclude(verdict: _Verdict, trial: Trial, count: Count, check: bool, may_scale: bool) -> LossSplit | None:
    if verdict.skipped:
        return None
    _refuse_what_cannot_be_split(verdict, trial, is_given=callable(count), check=check)
    if not verdict.checked:
        return _choose_unchecked(verdict, trial, count)
    split = verdict.split
    assert split is not None
    if split.read is None and not callable(count):
        if check:
            raise CannotSplitError(verdict.why_not, trial)
        return _take_nearest_rule(trial)
    if split.read is not None and not split.is_sum and verdict.rules:
        split = replace(split, count=verdict.rules[0], scale=scale_of(split.read, verdict.rules[0], trial))
    if verdict.error <= verdict.limit:
        accepts_changes = callable(count) or not check
        _refuse_what_this_step_cannot_use(split, verdict, trial, may_scale, accepts_changes)
        _say_found(split, verdict.error, trial)
        return split
    if check:
        why = f"the micro-batches' gradients differ from that of the unsplit samples by {verdict.error:.2g}"
        if callable(count):
            why = f"count= does not split this loss exactly: {why}"
        else:
            why = f"{why}, weighted by {split}: samples of a batch depend on one another"
        raise CannotSplitError(why, trial)
    _warn_unchecked(split, verdict.error)
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


def _take_nearest_rule(trial: Trial) -> LossSplit:
    """Return the counting rule with the smallest error, for ``check=False`` and a loss that hides its normalizers."""
    errors = {rule: error_of_rule(rule, trial) for rule in list_rules(trial, None)}
    nearest = min(errors, key=lambda rule: errors[rule])
    _warn_unchecked(LossSplit(None, nearest), errors[nearest])
    return LossSplit(None, nearest)


def _warn_unchecked(split: LossSplit, error: float) -> None:
    warn(f"each micro-batch is weighted by {split}, with an error of {error:.1%}, which changes the training")


def error_limit(trial: Trial) -> float:
    """Return the largest error that counts as rounding."""
    if trial.precise:
        return _FLOAT64
    parameters = trial.splits[0].parameters
    if parameters and all(parameter.dtype is torch.float64 for parameter in parameters):
        return _ALL_FLOAT64
    return _ROUNDED if trial.rounding else _FLOAT32


def _count_per_sample(split: LossSplit, trial: Trial) -> float:
    read = split.read
    if read is None or read.term is None:
        return 1.0
    assert trial.whole is not None
    count = read_count(trial.whole, read.term, read.varying[read.term])
    return count / trial.sample.size if count > 0 else 1.0


def _choose_unchecked(verdict: _Verdict, trial: Trial, count: Count) -> LossSplit:
    """Choose a split where no rank could compare gradients: the normalizer read, or the rule that fits most models."""
    split = verdict.split
    if callable(count):
        warn(f"micro-batches are weighted by count=, unchecked: {trial.why_not}")
        return LossSplit(None, count)
    if split is not None and split.read is not None:
        say("each micro-batch is weighted by %s; gradients were not compared: %s", split, trial.why_not)
        return split
    first = CountRule("targets" if find_labels(trial.sample.whole)[1] is not None else "samples")
    warn(
        f"each micro-batch is weighted by {first}, unchecked: {trial.why_not}. "
        "Give count= if the loss averages over something else."
    )
    return LossSplit(None, first, provisional=verdict.shows_nothing)


def _say_found(split: LossSplit, error: float, trial: Trial) -> None:
    what = "gradient" if trial.splits and trial.splits[0].parameters else "loss"
    say(
        "MicroBatching: each micro-batch is weighted by %s. Checked on %d samples: the %s matches the unsplit batch "
        "to %.0e",
        split,
        trial.sample.size,
        what,
        error,
    )
