"""Find, from a few samples, how the micro-batches of a loss are weighted, and check that the loss can be split."""

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import from_all_ranks, is_sharded, rank_count
from lightning_fasttrain.core.messages import explain, list_some, note_once, say, warn
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count, CountRule, CountTargets, named_count
from lightning_fasttrain.micro_batching.normalizer.split_rule import (
    LogRules,
    LossSplit,
    ReadNormalizer,
    WholeBatchNormalizer,
    classify_terms,
    find_log_rules,
    list_rules,
    match_rules,
)
from lightning_fasttrain.trial.runs import Trial, models_of
from lightning_fasttrain.trial.sample_rows import Sample, list_altered, sample_rows
from lightning_fasttrain.trial.try_split import TrialStep, distinguish_rounding, try_split, try_unsplit, try_whole


class CannotSplitError(ValueError):
    """A loss that is not a weighted sum of its micro-batches' losses.

    Attributes:
        why: the reason, as a clause.
        trial: the trial that showed it; None where the step was not tried.
    """

    def __init__(self, why: str, trial: Trial | None = None, *, of_window: bool = False):
        self.why, self.trial = why, trial
        what = "MicroBatching cannot split this loss exactly"
        way_out = (
            "Name the submodule in which samples do not depend on one another, with through=, give count= a function "
            "(of a batch: the number of terms its loss averages over), or use ActivationCheckpointing for memory"
        )
        if of_window:
            what = "a window of several batches, as of TokenWeightedAccumulation, cannot weight this loss exactly"
            way_out = (
                "Give count= a function (of a batch: the number of terms its loss averages over), or use "
                "accumulate_grad_batches, in which all batches have the same weight"
            )
        super().__init__(explain(what, why, way_out))


def find_split(
    trial_step: TrialStep,
    samples: Iterator[Sample],
    count: Count,
    *,
    check: bool,
    preferred: CountRule | None = None,
    log_rules: LogRules | None = None,
    together: bool = True,
    whole_batches: bool = False,
) -> LossSplit | None:
    """Return how the loss of a step is split; ``preferred`` is the counting rule that is tried first.

    Args:
        log_rules: the rules for logged values that earlier batches have shown.
        together: whether all ranks call this, and reach the same decision.
        whole_batches: whether complete batches are summed, each with its own statistics.

    Returns:
        The split; None where the step returned None, so that nothing could be found yet.

    Raises:
        CannotSplitError: the loss is not a weighted sum of its micro-batches' losses.
    """
    if callable(count) and not check:
        return LossSplit(None, count)
    if whole_batches:
        trial_step = replace(trial_step, in_turn=False)
    trial = try_split(trial_step, samples)
    trial = distinguish_rounding(trial_step, trial, lambda trial: _judge(trial, count, preferred).error)
    if whole_batches:
        trial.statistics = ()
    verdict = _judge(trial, count, preferred)
    # What fits these samples may do so by chance, such as weights that are all equal: it must fit altered ones, too.
    # test_micro_batches_train_as_the_unsplit_batches[(w / w.mean() * e).mean()] shows it.
    altered = [*_try_further(verdict, trial, trial_step, samples), *_try_altered(verdict, trial, trial_step)]
    for other in altered:
        judged = _judge(other, count if callable(count) else "auto", None)
        if not judged.is_right:
            why = judged.why_not or "samples of a batch depend on one another if their weights or masks differ"
            verdict = _Verdict(verdict.trial, why_not=why)
        elif verdict.is_right:
            verdict = _add_divisor(verdict, judged, trial, preferred)
    # Ranks that split a batch in different ways would wait for one another.
    if together:
        verdict = _find_worst(from_all_ranks([verdict]))
    split = _conclude(verdict, trial, count, check, trial_step.may_scale, whole_batches)
    if split is None:
        return None
    counted = split.read and split.count_in(trial.whole)
    if counted:
        split.per_sample = counted / trial.sample.size
    split.leaves = tuple(map(weakref.ref, trial.parameters))
    split.log_rules = find_log_rules(split, [trial, *altered], log_rules or {})
    return split


def find_weight(
    trial_step: TrialStep,
    samples: Callable[[], Iterator[Sample]],
    batch: object,
    count: Count,
    *,
    check: bool,
    preferred: CountRule | None = None,
    together: bool = True,
) -> LossSplit | None:
    """Return how batches are weighted that are summed unsplit, each with its own statistics.

    Samples show more than a whole batch, as which factors of a loss are constant. Where they do not run by themselves,
    or depend on one another, a batch has the weight that its own loss shows, or the given ``count``.

    Args:
        trial_step, count, check, preferred, together: as for :func:`find_split`.
        samples: yields samples of the batch.
        batch: the whole batch.

    Raises:
        CannotSplitError: neither samples nor the loss of the batch show its weight, or ``count`` contradicts them.
    """
    if callable(count) and not check:
        return LossSplit(None, count)
    search = functools.partial(find_split, trial_step, preferred=preferred, together=together, whole_batches=True)
    split: LossSplit | None = None
    try:
        split = search(samples(), count, check=True)
    except CannotSplitError as error:
        refused = error
    else:
        if split is not None and split.read is not None and split.read.is_absolute:
            split.read = replace(split.read, is_of_whole_batches=True)
        if split is None or not split.provisional:
            return split
        refused = CannotSplitError("they have no gradient")
    # Outside of the handler, so that an error of the user's step is shown alone.
    if callable(count):
        with suppress(CannotSplitError):
            search(samples(), "auto", check=True)
            raise refused from None
        say("each batch is weighted by count=, as given: its samples cannot be compared, since %s", refused.why)
        return LossSplit(None, count)
    try:
        return _read_batch(trial_step, batch, refused, together) or split
    except CannotSplitError:
        if check:
            raise
    return search(samples(), count, check=False)


def _read_batch(trial_step: TrialStep, batch: object, refused: CannotSplitError, together: bool) -> LossSplit | None:
    """Return the weighting of whole batches by what their losses show; None where this one has no gradient.

    Raises:
        CannotSplitError: its loss shows none.
    """
    # In the step's own precision, in which the batch is known to fit.
    trial = try_unsplit(replace(trial_step, in_turn=False), Sample(batch, 1, []), "as it is")
    leaves = tuple(map(weakref.ref, trial.parameters))
    kinds = {term.kind for term in trial.whole.terms if not term.of_parameters}
    if not trial.whole.is_finite or trial.whole.counts_nothing:
        kinds = set()
    if together:
        kinds = set().union(*from_all_ranks([kinds]))
    if not kinds:
        return None
    if kinds == {"sum"}:
        split = LossSplit(None, CountRule("sum"), leaves=leaves)
    elif kinds <= {"mean", "quotient"}:
        split = LossSplit(WholeBatchNormalizer(), None, leaves=leaves)
    else:
        raise CannotSplitError(refused.why, refused.trial, of_window=True)
    say("each batch is weighted by %s; its samples cannot be compared, since %s", split, refused.why)
    return split


@dataclass(frozen=True)
class _Verdict:
    """The result of one rank, which is sent to the others.

    Attributes:
        trial: the trial, without its runs.
        read: the normalizer that was read from the loss; None where there is none, or a given rule is checked.
        rules: the counting rules that reproduce it, the likeliest first, and its ratio to each.
        why_not: why the loss cannot be split that way; empty if it can, or nothing could be compared.
        error: the error of the split.
        limit: the largest error that counts as rounding.
    """

    trial: Trial
    read: ReadNormalizer | None = None
    rules: dict[CountRule, float] = field(default_factory=dict)
    why_not: str = ""
    error: float = float("inf")
    limit: float = 1.0

    @property
    def is_right(self) -> bool:
        """Whether the gradients matched."""
        return self.error <= self.limit


def _judge(trial: Trial, count: Count, preferred: CountRule | None) -> _Verdict:
    verdict = _Verdict(trial.without_runs(), limit=trial.limit)
    if callable(count):
        split = LossSplit(None, count)
    else:
        read = classify_terms(trial)
        if isinstance(read, str):
            return replace(verdict, why_not=read)
        split = LossSplit(read, None)
        verdict = replace(verdict, read=read, rules=match_rules(read, trial, preferred))
    if trial.why_not:
        return verdict
    return replace(verdict, error=trial.error(split.list_weights))


def _try_further(verdict: _Verdict, trial: Trial, trial_step: TrialStep, samples: Iterator[Sample]) -> list[Trial]:
    """Run the step on further samples where only one micro-batch had a gradient, until two have one.

    A hook of the user's that clips gradients, for example, does not show in one alone.
    """
    if not verdict.is_right or not trial_step.gradients or trial.has_two_gradients:
        return []
    if rank_count() > 1:  # a step may communicate, and other ranks may need no further samples
        return []
    for sample in samples:
        tried = try_split(replace(trial_step, in_turn=False), iter([sample]), trial.precision)
        if tried.has_two_gradients and tried.precision == trial.precision:
            return [tried]
    return []


def _try_altered(verdict: _Verdict, trial: Trial, trial_step: TrialStep) -> list[Trial]:
    """Run the step on the same samples with other weights, masks and labels, where this adds information."""
    if verdict.read is None or not verdict.is_right or not trial_step.gradients:
        return []
    ignored = {term.ignored for term in trial.whole.terms}
    # A plain cross_entropy; for any other loss, labels that it does not ignore may be out of range.
    samples = list_altered(trial.sample, ignored.pop() if len(ignored) == 1 else None)
    altered: list[Trial] = []
    for sample in samples:
        tried = try_split(replace(trial_step, in_turn=False), iter([sample]), trial.precision)
        # A step may fail on such values.
        if not tried.why_not and tried.precision == trial.precision:
            altered.append(tried)
    return altered


def _add_divisor(verdict: _Verdict, altered: _Verdict, trial: Trial, preferred: CountRule | None) -> _Verdict:
    """Return the verdict with the divisor that altered samples show, where it was 1 in all runs of the others.

    A count that is kept from zero, as by ``clamp(min=1)``, is 1 in samples of which only one counts.
    """
    if verdict.read is None or altered.read is None or verdict.read.structure != altered.read.structure:
        return verdict
    if verdict.read.term is not None or altered.read.term is None:
        return verdict
    error = trial.error(LossSplit(altered.read, None).list_weights)
    if error > verdict.limit:
        return verdict
    matched = match_rules(altered.read, trial, preferred)
    rules = {rule: scale for rule, scale in altered.rules.items() if rule in matched}
    return replace(verdict, read=altered.read, rules=rules, error=error)


def _find_worst(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Return the worst verdict of all ranks that could compare anything, with the rules that hold on all of them."""
    compared = [verdict for verdict in verdicts if not verdict.trial.why_not]
    compared = compared or [verdict for verdict in verdicts if verdict.read is not None]
    if not compared:
        return min(verdicts, key=lambda verdict: verdict.trial.is_skipped)
    # Errors in different precisions are compared by how far they are from their limits.
    worst = max(compared, key=lambda verdict: verdict.error / verdict.limit)
    state = dict.fromkeys(itertools.chain.from_iterable(verdict.trial.state for verdict in compared))
    rules = dict(worst.rules)
    for verdict in compared:
        rules = {rule: scale for rule, scale in rules.items() if rule in verdict.rules}
    return replace(worst, rules=rules, trial=replace(worst.trial, state=tuple(state)))


def _conclude(
    verdict: _Verdict, trial: Trial, count: Count, check: bool, may_scale: bool, whole_batches: bool
) -> LossSplit | None:
    """Return the split that a verdict allows; None where the step returned None.

    Raises:
        CannotSplitError: it allows none.
    """
    seen = verdict.trial
    if seen.is_skipped:
        return None
    if seen.statistics:
        what = "BatchNorm in training mode uses the statistics of the samples that run together"
        why = f"{what} ({list_some(seen.statistics)})"
        if check:
            raise CannotSplitError(why, trial)
        warn(f"{why}, which changes the training")
    is_unchecked = seen.why_not and (callable(count) or not (seen.failed and check))
    why_not = seen.why_not or verdict.why_not
    if not is_unchecked:
        _judge_state(seen.state, trial, check)  # which may be why the losses are not comparable
    if why_not and check and not is_unchecked:
        raise CannotSplitError(why_not, trial)
    split = _choose(verdict, trial, count)
    if is_unchecked:
        _say_unchecked(split, trial.why_not, whole_batches)
        return split
    error = trial.error(split.list_weights) if why_not and trial.splits else verdict.error
    if verdict.is_right:
        _refuse_what_this_step_cannot_use(split, trial, may_scale)
        _say_found(split, error, trial, whole_batches)
    elif check:
        why = f"the micro-batches' gradients differ from that of the unsplit samples by {error:.2g}"
        if callable(count):
            raise CannotSplitError(f"count= does not split this loss exactly: {why}", trial)
        raise CannotSplitError(f"{why}, weighted by {split}: samples of a batch depend on one another", trial)
    else:
        warn(f"each micro-batch is weighted by {split}, with an error of {error:.1%}, which changes the training")
    return split


def _judge_state(names: Sequence[str], trial: Trial, check: bool) -> None:
    """Raises: CannotSplitError: micro-batches leave other state under these names; only a warning without ``check``."""
    if not names or trial.statistics:  # of BatchNorm, which has been warned of, with its counters
        return
    why = f"the step changes {list_some(list(map(repr, names)))}, and would do so in each micro-batch"
    if check:
        raise CannotSplitError(why, trial)
    warn(f"{why}, which changes the training")


def _refuse_what_this_step_cannot_use(split: LossSplit, trial: Trial, may_scale: bool) -> None:
    """Raises: CannotSplitError: the total must be known before gradients are summed, and is not."""
    if split.count is None and not split.is_sum and not may_scale:
        why = f"no rule counts {split} beforehand, and this strategy sums gradients before they can be scaled"
        raise CannotSplitError(why, trial)


def _choose(verdict: _Verdict, trial: Trial, count: Count) -> LossSplit:
    """Return the split by the given rule, by the normalizer that was read, or by the nearest or likeliest rule."""
    if callable(count):
        return LossSplit(None, count)
    shows_nothing = verdict.trial.shows_nothing
    if verdict.read is not None:
        rule, scale = next(iter(verdict.rules.items()), (None, 1.0))
        return LossSplit(verdict.read, rule, scale, provisional=shows_nothing)
    splits = [LossSplit(None, rule, provisional=shows_nothing) for rule in list_rules(trial)]
    if trial.why_not:
        return splits[0]
    return min(splits, key=lambda split: trial.error(split.list_weights))


def _say_unchecked(split: LossSplit, why_not: str, whole_batches: bool) -> None:
    if split.read is not None or whole_batches:
        unit = "batch" if whole_batches else "micro-batch"
        say("each %s is weighted by %s; gradients were not compared: %s", unit, split, why_not)
    else:
        way_out = "Give another count= if the loss averages over something else."
        warn(f"each micro-batch is weighted by {split}, unchecked: {why_not}. {way_out}")


def _say_found(split: LossSplit, error: float, trial: Trial, whole_batches: bool) -> None:
    what = f"the {'gradient' if trial.parameters else 'loss'} matches the unsplit batch to {error:.0e}"
    unit = "each batch of a window" if whole_batches else "MicroBatching: each micro-batch"
    text = "%s is weighted by %s. Checked on %d samples: %s"
    say(text, unit, split, trial.sample.size, what)
    if trial.filled:
        filled = list_some(list(map(repr, trial.filled)))
        note_once(f"MicroBatching: {filled} gets an entry for each micro-batch, where the unsplit step adds one")
    if trial.metrics:
        metrics = list_some(list(map(repr, trial.metrics)))
        way_out = "give its update the number of terms as weight=, or log the value with self.log"
        note_once(f"MicroBatching: the metric {metrics} takes each micro-batch for a batch; {way_out}")


@check_arguments
def find_count(
    step: Callable[[Any], object],
    batch: object,
    n: PositiveInt = 2,
    *,
    count: Count = "auto",
    check: bool = True,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CountTargets:
    """Find a function that counts what a loss is divided by, without running the model.

    A few samples are run, unsplit and in micro-batches. The normalizer of each loss is read from its graph (see
    :func:`~lightning_fasttrain.micro_batching.read_normalizers`), the gradient of the unsplit samples is compared with
    the weighted sum of the micro-batches' gradients, and the counting rules that reproduce the normalizers are
    determined: targets other than -100, the same after the shift of next-token models, other ignored labels, samples,
    and a plain sum. The step runs without dropout and with autocast off, and everything it changes is restored: random
    states, and buffers, metrics and plain attributes of the models that it uses.

    :func:`~lightning_fasttrain.accumulate_gradients` and ``MicroBatching`` do this themselves, and need no rule.

    Args:
        step: maps a micro-batch to its loss, or to a mapping with a ``"loss"``.
        batch: anything :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
        n: the number of micro-batches that batches will be split into; one of them is known to fit in memory.
        count: a rule to check instead of finding one.
        check: False uses the nearest rule and reports its error.
        no_sync: as for :func:`~lightning_fasttrain.accumulate_gradients`.

    Returns:
        A function that maps a batch to its weight. Pass it as ``count=``.

    Raises:
        ValueError: the loss cannot be split, or no rule counts what it is divided by.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.randn(6, 3)
        >>> find_count(lambda x: net(x).pow(2).sum(), data)
        CountRule(name='sum', ignore_index=-100)
    """
    named = named_count(count)
    trial_step = trial_step_of(step, no_sync)
    split = refused = None
    try:
        split = find_split(trial_step, sample_rows(batch, -(-batch_size(batch) // n)), named, check=check)
    except CannotSplitError as error:
        if error.trial is None or not error.trial.failed:
            raise
        refused = error
    if refused is not None:  # outside of the handler, so that an error of the user's step is shown alone
        try_whole(trial_step, batch)
        raise refused
    assert split is not None  # may_skip is off: a step that returns None was refused
    if split.is_sum:
        return CountRule("sum")
    if split.count is None:
        why = f"it is divided by {split.read}, which is not a number of samples or labels"
        raise CannotSplitError(f"{why}, so no rule can count it beforehand; micro-batches can still read it")
    return split.count


def trial_step_of(
    step: Callable[[Any], object], no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
) -> TrialStep:
    """Return what is tried of a step function of a bare loop."""
    models = models_of(step)
    replicas = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]

    @contextmanager
    def skip_syncs() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(no_sync())
            for replica in replicas:
                stack.enter_context(replica.no_sync())
            yield

    sharded = any(map(is_sharded, models))
    return TrialStep(
        step, models, skip_syncs, gradients=not sharded, may_scale=not (sharded or any(map(_is_engine, models)))
    )


def trial_step_of_trainer(trainer: L.Trainer, pl_module: L.LightningModule, batch_idx: int) -> TrialStep:
    """Return what is tried of the training step of a Trainer's run."""
    strategy, sharded = trainer.strategy, is_sharded(pl_module)
    # Bypass the strategy where possible, so that nothing is synchronized.
    training_step = strategy.training_step if sharded else pl_module.training_step
    # Of the class, since FSDP2 replaces the method of the module by one that takes any arguments.
    takes_index = len(inspect.signature(type(pl_module).training_step).parameters) > 2
    rest = [batch_idx] if takes_index else []
    context = strategy.precision_plugin.train_step_context
    return TrialStep(
        lambda rows: training_step(rows, *rest), [pl_module], context, gradients=not sharded, may_skip=True
    )


def _is_engine(model: nn.Module) -> bool:
    """Whether DeepSpeed holds the gradients of the model."""
    deepspeed = sys.modules.get("deepspeed")  # importing it takes seconds
    return deepspeed is not None and any(isinstance(module, deepspeed.DeepSpeedEngine) for module in model.modules())
