"""Classify the divisors in a loss as normalizers or constant factors, and find the rules that count them."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.data.normalizer.count_targets import CountRule, is_sum
from lightning_fasttrain.data.normalizer.split_rule import ReadNormalizer
from lightning_fasttrain.data.normalizer.trial.runs import ReadTerm, Run, Trial

_SURE = 1e-5
_UNREADABLE = {
    "nonlinear": "the loss is not a sum over samples ({} of a mean or sum)",
    "opaque": "the graph of the loss does not show its divisor ({})",
}
_NOTHING = "1 (the loss is a sum over samples)"


def list_rules(trial: Trial, preferred: CountRule | None = None) -> list[CountRule]:
    """Return the counting rules that apply to such batches, the likeliest first."""
    rules = [] if preferred is None else [preferred]
    rules += _count_labels(term.ignored for term in trial.whole.terms if term.ignored is not None)
    rules += [CountRule("targets"), CountRule("next_tokens"), CountRule("samples"), CountRule("sum")]
    rules += _count_labels(sorted(_may_be_ignored(trial)))
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


def _may_be_ignored(trial: Trial) -> set[int]:
    """Return labels that may be ignored: the smallest, largest and most frequent of the samples, and the usual ones."""
    found: set[int] = set()
    for run in itertools.chain.from_iterable(trial.splits[:1]):
        labels = find_labels(run.batch)[1]
        if labels is not None and labels.numel() > 0:
            values, frequencies = labels.cpu().unique(return_counts=True)
            found |= {int(values[0]), int(values[-1]), int(values[frequencies.argmax()])}
            # 0 is padding in text, 255 a void class in segmentation; -1 is used in both.
            found |= {0, -1, 255}.intersection(values.tolist())
    return found


def match_rules(read: ReadNormalizer, trial: Trial, preferred: CountRule | None) -> dict[CountRule, float]:
    """Return the rules whose count is proportional to the read normalizer in all runs, with the ratio of the two.

    The likeliest is first; those that give the normalizer itself are before all others.
    """
    # A rule that is only proportional, as samples are in rows of equal length, fits more batches by chance.
    equal: dict[CountRule, float] = {}
    proportional: dict[CountRule, float] = {}
    for rule in list_rules(trial, preferred):
        scale = None if read.term is None or is_sum(rule) else _find_scale(read, rule, trial)
        if scale is not None:
            found = equal if abs(scale - 1) <= _SURE else proportional
            found[rule] = scale
    return {**equal, **proportional}


def _find_scale(read: ReadNormalizer, rule: CountRule, trial: Trial) -> float | None:
    """Return the ratio of the read normalizer to the count in all micro-batches; None if it is not the same in all."""
    scale: float | None = None
    for run in trial.runs[1:]:
        counted, count = float(rule(run.batch)), read.count_in(run)
        if counted == 0 and (count == 0 or run.is_zero):
            continue
        if counted == 0:
            return None
        # The first ratio is the one that all others must have.
        scale = scale or count / counted
        if not torch.isclose(torch.tensor(count / counted), torch.tensor(scale)):
            return None
    return scale


def classify_terms(trial: Trial) -> ReadNormalizer | str:
    """Return which of the values read from the graphs weights micro-batches, or the reason why none does."""
    why_not = _find_unreadable(trial.runs)
    if why_not:
        return why_not
    whole = trial.whole
    varying = tuple(_find_varying(place, trial.runs) for place in range(len(whole.terms)))
    normalizers: list[ReadNormalizer] = []
    for place, term in enumerate(whole.terms):
        read = ReadNormalizer(whole.structure, place, (), varying, 0.0, None, _describe(term))
        # A factor is the same for all samples, and so is what cancels.
        if not varying[place] or _cancels(read, trial.runs):
            continue
        offset = _find_offset(read, trial)
        if offset is None:
            return f"the divisor of {term.name} does not add up over samples"
        normalizers.append(replace(read, offset=offset))
    if not normalizers:
        return ReadNormalizer(whole.structure, None, (), varying, 0.0, None, _NOTHING)
    places = tuple(read.term for read in normalizers if read.term is not None)
    # A penalty on weights is the same in each micro-batch, whose weights add up to 1.
    if not all(term.of_parameters for place, term in enumerate(whole.terms) if place not in places):
        return "the loss adds a sum over samples to a mean"
    # Several terms have one normalizer if it gives each micro-batch the same share in all of them.
    first = normalizers[0]
    expected = _list_shares(first, trial)
    for other in normalizers[1:]:
        if not torch.allclose(expected, _list_shares(other, trial), rtol=1e-5, atol=1e-8):
            return "the loss has several normalizers"
    return replace(first, others=places[1:], summed=_find_summed(first, trial.runs))


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
    return ""


def classify_alone(run: Run) -> ReadNormalizer | None:
    """Return the likely normalizer of a loss that cannot be compared with another: its reduction is over samples."""
    if len(run.terms) != 1 or run.terms[0].kind not in ("mean", "sum", "quotient"):
        return None
    term = run.terms[0]
    divisors = [place for place, slot in enumerate(term.slots) if slot.divides]
    if not divisors:
        return ReadNormalizer(run.structure, None, (), ((),), 0.0, None, _NOTHING)
    # The last divisor is the reduction's own.
    return ReadNormalizer(run.structure, 0, (), ((divisors[-1],),), 0.0, None, _describe(term))


def _find_summed(read: ReadNormalizer, runs: Sequence[Run]) -> float | None:
    """Return the ratio of the divisor to the number of summed elements; None where they are not proportional."""
    assert read.term is not None
    scale: float | None = None
    for run in runs:
        summed, divisor = run.terms[read.term].summed, read.count_in(run)
        if summed is None or (summed != 0 and divisor == 0):
            return None
        if summed == 0:
            continue
        scale = scale or divisor / summed
        if abs(divisor / summed - scale) > _SURE * abs(scale):
            return None
    return scale


def _cancels(read: ReadNormalizer, runs: Sequence[Run]) -> bool:
    """Whether a mean is multiplied by the same value that it was divided by."""
    assert read.term is not None
    slots = runs[0].terms[read.term].slots
    if len({slots[place].divides for place in read.varying[read.term]}) < 2:
        return False  # there is no multiplier, or no divisor
    seen = [count for count in map(read.count_in, runs) if count]  # 0 where no element counts
    return bool(seen) and max(seen) - min(seen) <= _SURE * max(seen)


def _find_varying(place: int, runs: Sequence[Run]) -> tuple[int, ...]:
    """Return the factors of a term that depend on the samples."""
    terms = [run.terms[place] for run in runs]
    varying = []
    for slot in range(len(terms[0].slots)):
        values = torch.tensor([term.slots[slot].value for term in terms], dtype=torch.float64)
        if not torch.allclose(values, values[0].expand_as(values), rtol=1e-6, atol=0.0):
            varying.append(slot)
    return tuple(varying)


def _find_offset(read: ReadNormalizer, trial: Trial) -> float | None:
    """Return the constant added to a count, such as an epsilon; None if the value does not add up like a count."""
    whole = read.count_in(trial.whole)
    offsets: list[float] = []
    for runs in trial.splits:
        counts = list(map(read.count_in, runs))
        missed = sum(counts) - whole
        if abs(missed) <= 1e-12 * abs(whole):
            missed = 0.0
        # A count that is kept from zero, as by clamp(min=1), is too large by the difference.
        if missed and min(counts) == missed and missed <= 1 and runs[counts.index(missed)].is_zero:
            missed = 0.0
        if not abs(missed) <= 1e-3 * abs(whole):
            return None
        offsets.append(missed / (len(counts) - 1))  # the sum holds the constant once per micro-batch
    if all(abs(offset - offsets[0]) <= 1e-3 * abs(offsets[0]) for offset in offsets):
        return offsets[0]
    return 0.0 if max(map(abs, offsets)) <= 1e-6 * abs(whole) else None


def _list_shares(read: ReadNormalizer, trial: Trial) -> Tensor:
    """Return the shares of all micro-batches in the counts of their samples."""
    shares: list[float] = []
    for runs in trial.splits:
        counts = list(map(read.count_in, runs))
        total = sum(counts) or 1.0
        shares += [count / total for count in counts]
    return torch.tensor(shares, dtype=torch.float64)


def _describe(term: ReadTerm) -> str:
    if term.name in ("NllLoss", "NllLoss2D"):
        return "its number of targets, or the sum of their class weights (cross_entropy)"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the divisor of its sum"
