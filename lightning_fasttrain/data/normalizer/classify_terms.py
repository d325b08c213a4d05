"""Classify the divisors in a loss as normalizers or constant factors, and find the rules that count them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.split_rule import ReadNormalizer
from lightning_fasttrain.data.normalizer.trial.runs import ReadTerm, Run, Trial

_SURE = 1e-5
_UNREADABLE = {
    "nonlinear": "the loss is not a sum over samples ({} of a mean or sum)",
    "opaque": "the graph of the loss does not show its divisor ({})",
}


def list_rules(trial: Trial, preferred: CountRule | None = None) -> list[CountRule]:
    """Return the counting rules that apply to such batches, the likeliest first."""
    rules = [] if preferred is None else [preferred]
    rules += _count_labels(term.ignored for term in trial.whole.terms if term.ignored is not None)
    rules += [CountRule("targets"), CountRule("next_tokens"), CountRule("samples"), CountRule("sum")]
    labels = find_labels(trial.sample.whole)[1]
    if labels is not None and labels.numel() > 0:
        # Labels that the loss may ignore though its graph does not show it.
        values, frequencies = labels.cpu().unique(return_counts=True)
        rules += _count_labels(sorted({int(values[0]), int(values[-1]), int(values[frequencies.argmax()])}))
    found: dict[CountRule, None] = {}
    for rule in rules:
        with suppress(ValueError):  # it does not apply
            rule(trial.sample.whole)
            found[rule] = None
    return list(found)


def _count_labels(ignored: Iterable[int]) -> Iterator[CountRule]:
    for index in ignored:
        yield CountRule("targets", index)
        yield CountRule("next_tokens", index)


def match_rules(read: ReadNormalizer, trial: Trial, preferred: CountRule | None) -> dict[CountRule, float]:
    """Return the rules whose count is proportional to the read normalizer in all runs, with the ratio of the two.

    The likeliest is first; those that give the normalizer itself are before all others. Sharded parameters need the
    total before the first backward, as in ``test_techniques_train_as_under_ddp``.
    """
    if read.term is None:
        return {}
    micro_batches = trial.runs[1:]
    divisors = list(map(read.count_in, micro_batches))
    found: dict[CountRule, float] = {}
    for rule in list_rules(trial, preferred):
        scale = _find_ratio([float(rule(run.batch)) for run in micro_batches], divisors)
        if scale is not None and rule.name != "sum":
            found[rule] = scale
    # A rule that is only proportional, as samples are in rows of equal length, fits more batches by chance.
    return dict(sorted(found.items(), key=lambda pair: abs(pair[1] - 1) > _SURE))


def _find_ratio(counts: Sequence[float | None], divisors: Sequence[float]) -> float | None:
    """Return the ratio of the divisors to the counts of the same samples; None if it is not the same for all."""
    ratio: float | None = None
    for count, divisor in zip(counts, divisors, strict=True):
        if count == divisor == 0:
            continue
        if not (count and divisor):
            return None
        # The first ratio is the one that all others must have.
        ratio = ratio or divisor / count
        if not abs(divisor / count - ratio) <= _SURE * abs(ratio):
            return None
    return ratio


def classify_terms(trial: Trial) -> ReadNormalizer | str:
    """Return which of the values read from the graphs weights micro-batches, or the reason why none does.

    What adds up over samples is a normalizer; what is the same for all of them is a factor.
    """
    why_not = _find_unreadable(trial.runs)
    if why_not:
        return why_not
    terms = trial.whole.terms
    varying = tuple(_find_varying(place, trial.runs) for place in range(len(terms)))
    found: list[ReadNormalizer] = []
    places: list[int] = []
    for place, term in enumerate(terms):
        read = ReadNormalizer(trial.whole.structure, varying, place, name=_describe(term))
        # A mean that is multiplied by what it was divided by has no normalizer.
        cancels = len(trial.runs) > 1 and not _differ(list(map(read.count_in, trial.runs)))
        if not varying[place] or cancels:
            continue
        offset = _find_offset(read, trial)
        if offset is None:
            return f"the divisor of {term.name} does not add up over samples"
        read = replace(read, offset=offset)
        summed = _find_ratio([run.terms[place].summed for run in trial.runs], list(map(read.count_in, trial.runs)))
        found.append(replace(read, summed=summed))
        places.append(place)
    if not found:
        return ReadNormalizer(trial.whole.structure, varying)
    # A penalty on weights is the same in each micro-batch, whose weights add up to 1.
    if not all(term.of_parameters for place, term in enumerate(terms) if place not in places):
        return "the loss adds a sum over samples to a mean"
    # Several terms have one normalizer if it gives each micro-batch the same share in all of them.
    first = found[0]
    expected = list(map(first.count_in, trial.runs))
    for other in found[1:]:
        if _find_ratio(expected, list(map(other.count_in, trial.runs))) is None:
            return "the loss has several normalizers"
    return replace(first, others=tuple(places[1:]))


def _find_unreadable(runs: Sequence[Run]) -> str:
    """Return why terms cannot be compared over these runs; empty if they can."""
    terms = runs[0].terms
    if not terms:
        return "the loss has no autograd graph"
    if any(run.structure != runs[0].structure for run in runs):
        return "the loss consists of different terms for different samples"
    for term in terms:
        if term.kind in _UNREADABLE:
            return _UNREADABLE[term.kind].format(term.name)
    if len(runs) == 1 and len(terms) > 1:
        return "its terms cannot be compared with those of another sample"
    return ""


def _find_varying(place: int, runs: Sequence[Run]) -> tuple[int, ...]:
    """Return the factors of a term that depend on the samples."""
    slots = runs[0].terms[place].slots
    if len(runs) == 1:
        # Nothing to compare it with: the last divisor is the reduction's own.
        return tuple(slot for slot in range(len(slots)) if slots[slot].divides)[-1:]
    varying: list[int] = []
    for slot in range(len(slots)):
        if _differ([float(run.terms[place].slots[slot].value) for run in runs]):
            varying.append(slot)
    return tuple(varying)


def _differ(values: Sequence[float]) -> bool:
    numbers = torch.tensor(values, dtype=torch.float64)
    return not torch.allclose(numbers, numbers[0].expand_as(numbers), rtol=1e-6, atol=0.0)


def _find_offset(read: ReadNormalizer, trial: Trial) -> float | None:
    """Return the constant added to a count, such as an epsilon; None if the value does not add up like a count."""
    whole = read.count_in(trial.whole)
    offsets: list[float] = []
    for runs in trial.splits:
        counts = list(map(read.count_in, runs))
        missed = sum(counts) - whole
        if not abs(missed) <= 1e-3 * abs(whole):
            return None
        offsets.append(missed / (len(counts) - 1))  # the sum holds the constant once per micro-batch
    if all(abs(offset - offsets[0]) <= 1e-3 * abs(offsets[0]) for offset in offsets):
        return next(iter(offsets), 0.0)
    if max(map(abs, offsets)) <= 1e-6 * abs(whole):
        return 0.0
    return None


def _describe(term: ReadTerm) -> str:
    if term.name in ("NllLoss", "NllLoss2D"):
        return "its number of targets, or the sum of their class weights (cross_entropy)"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the divisor of its sum"
