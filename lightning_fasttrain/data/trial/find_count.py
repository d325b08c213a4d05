"""By what the parts of a batch must be weighed so that they add up: found, and checked, on a few samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_fasttrain._labels import find_labels
from lightning_fasttrain._messages import explain, say, warn
from lightning_fasttrain._ranks import rank_count
from lightning_fasttrain.data.count_targets import Count, CountRule, CountTargets, named_count, weights_of
from lightning_fasttrain.data.split_batch import batch_size
from lightning_fasttrain.data.trial._split_trial import Sample, Split, Stage, Trial, some_rows, try_split
from lightning_fasttrain.data.trial._step_parts import models_of
from lightning_fasttrain.data.trial._trial_mode import SeenLoss

_FLOAT32 = 1e-3  # a right rule misses by 1e-6 or so, a wrong one by percents
_ROUNDED = 5e-2  # where something is computed with fewer bits
_TIED = 3e-6  # errors below it are float32's rounding, and say nothing about a rule


def find_count(
    step: Callable[[Any], Any],
    batch: Any,
    n: int = 2,
    *,
    count: Count = "auto",
    check: bool = True,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> CountTargets:
    """Find by what the parts of a batch must be weighed, and check that the loss can be split at all.

    A loss can be split exactly if and only if the gradient of the whole is the weighted sum of its pieces' gradients.
    So a few samples are run, whole and cut in two, twice, and loss *and* gradient are compared for each rule in turn:
    targets other than -100, the same after the shift of next-token models, other ignored labels, samples, and a plain
    sum. The step runs without dropout and with autocast off, and what it changes is put back: random states, and
    buffers, metrics and plain attributes of the models that it uses.

    :func:`~lightning_fasttrain.accumulate_gradients` and ``MicroBatching`` call it on their first batch by
    themselves. It costs about as much as one or two parts, once.

    Args:
        step: a part of the batch → its loss, or a mapping with a ``"loss"``.
        batch: anything :func:`~lightning_fasttrain.data.split_batch` takes, of at least two samples.
        n: the number of parts that batches will be split into: one part is known to fit.
        count: a rule to check instead of finding one.
        check: False takes the nearest rule, and says how far it is off.
        no_sync: as for :func:`~lightning_fasttrain.accumulate_gradients`.

    Returns:
        batch → its weight. Pass it on as ``count=``.

    Raises:
        ValueError: no rule holds; the message lists what was tried and by how much each missed.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.randn(6, 3)
        >>> find_count(lambda x: net(x).pow(2).sum(), data)
        CountRule(name='sum', ignore_index=-100)
    """
    models = models_of(step)
    replicas = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]

    @contextmanager
    def skip_syncs() -> Iterator[None]:
        with ExitStack() as stack:
            for context in (no_sync, *(replica.no_sync for replica in replicas)):
                stack.enter_context(context())
            yield

    stage = Stage(step, models, skip_syncs, gradients=not any(map(is_sharded, models)))
    part_size = -(-batch_size(batch) // n)
    found = find_on(stage, some_rows(batch, part_size), named_count(count), check=check)
    assert found is not None  # this stage refuses a step that returns None
    return found


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether parameters are in pieces, so that their gradients cannot be taken beside the training's own."""
    # `ds_id` is of DeepSpeed's stage 3, `device_mesh` of DTensors.
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())


def find_on(
    stage: Stage,
    samples: Iterator[Sample],
    count: Count,
    *,
    check: bool,
    preferred: CountRule | None = None,
) -> CountTargets | None:
    """:func:`find_count` for a step that runs on a given stage; ``preferred`` is tried first.

    Returns None where the step returned None, and nothing could be found yet.
    """
    if callable(count) and not check:
        return count
    trial = try_split(stage, samples)
    seen = [_told_by(loss, trial.sample.whole) for loss in trial.losses]
    # From here on each rank gathers what each has found, so all make the same calls, whatever they could compare.
    told = _from_all_ranks([rule for rule in (preferred, *seen) if rule is not None])
    rules = [count] if callable(count) else _rules(trial, told)
    fit = _find_worst(_from_all_ranks([_measure(trial, rules)]))
    if fit is None:
        skipped = any(_from_all_ranks([trial.is_skipped]))
        return None if skipped else _choose_unchecked(trial, rules, told, callable(count))
    # Rules that these samples do not tell apart are as good as one another: the likeliest comes first.
    nearest = max(3 * min(fit.errors), _TIED)
    (found, error), *others = [pair for pair in zip(rules, fit.errors, strict=True) if pair[1] <= nearest]
    # Within the limit a rule may still be wrong: it must come near to the best weights that there are.
    if error <= min(fit.limit, max(3 * fit.best, 1e-5)):
        _say_found(found, error, trial, others[0][0] if others and not told else None)
    elif check:
        raise ValueError(_refusal(rules, fit, trial))
    else:
        warn(f"micro-batches are weighed by {_name_of_rule(found)}, which is off by {error:.1%}: not the same training")
    return found


@dataclass(frozen=True)
class _Fit:
    """How well rules split a loss.

    Attributes:
        errors: of each rule.
        best: of the best weights there are, whatever they mean.
        limit: the largest that is taken for rounding.
    """

    errors: list[float]
    best: float
    limit: float


def _find_worst(fits: Sequence[_Fit | None]) -> _Fit | None:
    """Of all ranks that could compare anything."""
    known = [fit for fit in fits if fit is not None]
    if not known:
        return None
    columns = zip(*[fit.errors for fit in known], strict=True)
    best = max(fit.best for fit in known)
    limit = max(fit.limit for fit in known)
    return _Fit([max(column) for column in columns], best, limit)


def _rules(trial: Trial, told: Sequence[CountRule]) -> list[CountRule]:
    """The candidates, the likeliest first; the same on all ranks."""
    ignored = sorted({index for some in _from_all_ranks([_may_be_ignored(trial)]) for index in some} - {-100})
    usual = [CountRule("targets"), CountRule("next_tokens"), CountRule("samples"), CountRule("sum")]
    others = [CountRule(name, index) for index in ignored for name in ("targets", "next_tokens")]
    return list(dict.fromkeys([*told, *usual, *others]))


def _may_be_ignored(trial: Trial) -> set[int]:
    """Labels of the samples that were tried: the least, the greatest, the most frequent, and what others use."""
    found: set[int] = set()
    for piece in trial.splits[0].pieces if trial.splits else ():
        labels = find_labels(piece)[1]
        if labels is not None and labels.numel() > 0:
            values, frequencies = labels.cpu().unique(return_counts=True)
            found |= {int(values[0]), int(values[-1]), int(values[frequencies.argmax()])}
            # 0 is padding in text, 255 no class in segmentation; -1 is used in both.
            found |= {value for value in (0, -1, 255) if bool((values == value).any())}
    return found


def _told_by(seen: SeenLoss, sample: Any) -> CountRule | None:
    """The rule of a loss that was given the sample's own labels, moved or not."""
    labels = find_labels(sample)[1]
    if labels is None or not seen.is_plain_mean:
        return None
    forms = [("targets", labels)]
    if labels.ndim > 1:
        moved = labels[..., 1:]
        filled = torch.cat([moved, torch.full_like(labels[..., :1], seen.ignore_index)], dim=-1)
        forms += [("next_tokens", moved), ("next_tokens", filled)]
    for name, form in forms:
        if torch.equal(seen.target.flatten(), form.flatten().to(seen.target)):
            return CountRule(name, seen.ignore_index)
    return None


def _measure(trial: Trial, rules: Sequence[CountTargets]) -> _Fit | None:
    if trial.why_not:
        return None
    floor = 0.3 if trial.rounding else 1e-2  # smaller gradients are mostly rounding
    errors = [_error(rule, trial.splits, floor) for rule in rules]
    if not trial.splits[0].parameters:  # two weights can always explain one loss
        return _Fit(errors, _ROUNDED, _ROUNDED)
    best = max(split.error(split.best_weights(), floor) for split in trial.splits)
    return _Fit(errors, best, _ROUNDED if trial.rounding else _FLOAT32)


def _error(rule: CountTargets, splits: Sequence[Split], floor: float) -> float:
    errors = []
    for split in splits:
        try:
            counts, total = weights_of(rule, split.pieces)
        except ValueError:
            if isinstance(rule, CountRule):
                return float("inf")  # it does not apply to such batches
            raise
        # Where the total is 0 each count is 0, and so is each weight.
        errors.append(split.error([float(count) / max(float(total), 1e-30) for count in counts], floor))
    return max(errors)


def _from_all_ranks(mine: list[Any]) -> list[Any]:
    """The entries of all ranks' lists, so that all decide alike."""
    if rank_count() == 1:
        return mine
    gathered: list[Any] = [None] * rank_count()
    dist.all_gather_object(gathered, mine)
    return [entry for some in gathered for entry in some]


def _choose_unchecked(
    trial: Trial, rules: Sequence[CountTargets], told: Sequence[CountRule], is_given: bool
) -> CountTargets:
    """No rank could compare anything: what the loss itself told, else what fits most models."""
    if is_given:
        warn(f"micro-batches are weighed as count= says; nothing was checked, as {trial.why_not}")
        return rules[0]
    explained = [seen for seen in trial.losses if seen.is_plain_mean and float(seen.value) == trial.value]
    if told and explained:
        say("micro-batches are weighed by %s: so the step's own cross_entropy averages", rules[0])
        return rules[0]
    first = rules[0] if told or find_labels(trial.sample.whole)[1] is not None else CountRule("samples")
    warn(
        f"micro-batches are weighed by {_name_of_rule(first)}; nothing was checked, as {trial.why_not}. "
        "Give count= if the loss averages over something else."
    )
    return first


def _say_found(rule: CountTargets, error: float, trial: Trial, tied: CountTargets | None) -> None:
    what = "loss and gradient" if trial.splits and trial.splits[0].parameters else "the loss"
    alike = "" if tied is None else f" (these samples do not tell it from {_name_of_rule(tied)})"
    say(
        "micro-batches are weighed by %s%s; checked on %d samples: pieces add up in %s to %.0e",
        _name_of_rule(rule),
        alike,
        trial.sample.size,
        what,
        error,
    )


def _name_of_rule(rule: CountTargets) -> str:
    return str(rule) if isinstance(rule, CountRule) else "count="


def _refusal(rules: Sequence[CountTargets], fit: _Fit, trial: Trial) -> str:
    """What was tried, by how much each missed, and the ways out for this kind of loss."""
    by_error = sorted(zip(fit.errors, rules, strict=True), key=lambda pair: pair[0])
    tried = ", ".join(f"{_name_of_rule(rule)} ({error:.2g})" for error, rule in by_error[:5])
    weighted = [seen for seen in trial.losses if seen.weighted]
    if weighted:
        why = "the loss weighs classes, so each target counts with its class's weight"
        way_out = (
            f"Give count=lambda batch: weight[labels[labels != {weighted[0].ignore_index}]].sum(), with the class "
            "weights and the labels of the batch"
        )
    elif fit.best <= fit.limit:
        weights = ", ".join(f"{weight:.4g}" for weight in trial.splits[0].best_weights())
        why = f"pieces add up with the weights {weights}, which no known rule gives"
        way_out = "Give count= a function: batch → the number of terms that its loss averages over"
    else:
        why = (
            f"whatever the weights, pieces miss the whole by {fit.best:.2g}: samples of a batch depend on one another, "
            "as in contrastive or router losses"
        )
        way_out = (
            "Use ActivationCheckpointing for memory, accumulate_grad_batches if parts may be batches of their own, or "
            f"check=False to train with an error of {min(fit.errors):.2g}"
        )
    return explain(f"this loss is not split by any of: {tried}", f"relative error in brackets; {why}", way_out)
