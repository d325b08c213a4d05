"""Tell the numbers that a loss is divided by from factors, by what adds up over the pieces of some samples."""

from collections.abc import Sequence

import torch

from lightning_fasttrain.data.normalizer.read_normalizers import Slot
from lightning_fasttrain.data.normalizer.split_rule import ReadNormalizer, count_of
from lightning_fasttrain.data.normalizer.trial.runs import Run, Split
from lightning_fasttrain.data.normalizer.trial.try_split import Trial

_SURE = 1e-5
_UNREADABLE = {
    "nonlinear": "the loss is not a sum over samples ({} of a mean or sum)",
    "opaque": "the loss does not show what it is divided by ({})",
}
_NOTHING = "nothing: the loss is a sum, and its micro-batches are added"


def classify_terms(splits: Sequence[Split]) -> ReadNormalizer | str:
    """What weights micro-batches, of the numbers that were read; or why nothing does."""
    first = splits[0].whole
    runs = [run for split in splits for run in (split.whole, *split.runs)]
    why_not = _find_unreadable(runs)
    if why_not:
        return why_not
    varying = tuple(_find_varying(place, runs) for place in range(len(first.terms)))
    normalized = [place for place, places in enumerate(varying) if places and not _cancels(place, places, runs)]
    offsets: dict[int, float] = {}
    for place in normalized:
        offset = _find_offset(place, varying[place], splits)
        if offset is None:
            return f"what {first.terms[place].name} is divided by does not add up over samples"
        offsets[place] = offset
    if not normalized:
        return ReadNormalizer(first.structure, None, (), varying, 0.0, None, _NOTHING)
    # A penalty on weights is the same in each micro-batch, whose weights add up to 1.
    if not all(term.of_parameters for place, term in enumerate(first.terms) if place not in normalized):
        return "the loss has a sum over samples beside a mean"
    shares = [_shares(place, varying[place], offsets[place], splits) for place in normalized]
    if not all(torch.allclose(shares[0], share, rtol=1e-5, atol=1e-8) for share in shares):
        return "the loss has several normalizers"
    term, *same = normalized
    summed = _find_summed(term, varying[term], offsets[term], runs)
    return ReadNormalizer(first.structure, term, tuple(same), varying, offsets[term], summed, _describe(first, term))


def _find_unreadable(runs: Sequence[Run]) -> str:
    """Why terms cannot be compared over these runs; empty if they can."""
    terms = runs[0].terms
    if not terms:
        return "its loss has no autograd graph"
    if any(run.structure != runs[0].structure for run in runs):
        return "the loss is made of other terms for some samples than for others"
    unreadable = [term for term in terms if term.kind in _UNREADABLE]
    return _UNREADABLE[unreadable[0].kind].format(unreadable[0].name) if unreadable else ""


def classify_alone(run: Run) -> ReadNormalizer | None:
    """What is likely of a loss that cannot be compared with another: its reduction is over samples."""
    if len(run.terms) != 1 or run.terms[0].kind not in ("mean", "sum", "quotient"):
        return None
    term = run.terms[0]
    divisors = [place for place, (_, divides) in enumerate(term.slots) if divides]
    if not divisors:
        return ReadNormalizer(run.structure, None, (), ((),), 0.0, None, _NOTHING)
    varying = (tuple(divisors[-1:]),)
    return ReadNormalizer(run.structure, 0, (), varying, 0.0, None, _describe(run, 0))


def _find_summed(place: int, varying: Sequence[int], offset: float, runs: Sequence[Run]) -> float | None:
    """How many times what the sum is over the divisor is; None where they are not in proportion."""
    scale: float | None = None
    for run in runs:
        summed, divisor = run.terms[place].summed, read_count(run, place, varying) - offset
        if summed is None or (summed != 0 and divisor == 0):
            return None
        if summed == 0:
            continue
        if scale is not None and abs(divisor / summed - scale) > _SURE * abs(scale):
            return None
        scale = divisor / summed
    return scale


def _cancels(place: int, varying: Sequence[int], runs: Sequence[Run]) -> bool:
    """Whether a mean is multiplied by the number that it was divided by."""
    if len({runs[0].terms[place].slots[slot][1] for slot in varying}) < 2:
        return False  # nothing multiplies, or nothing divides
    counts = [read_count(run, place, varying) for run in runs]
    seen = [count for count in counts if count]  # 0 where nothing counts
    return bool(seen) and max(seen) - min(seen) <= _SURE * max(seen)


def _find_varying(place: int, runs: Sequence[Run]) -> tuple[int, ...]:
    """The numbers of a term that depend on the samples."""
    terms = [run.terms[place] for run in runs]
    varying = []
    for slot in range(len(terms[0].slots)):
        values = torch.tensor([term.slots[slot][0] for term in terms], dtype=torch.float64)
        if not torch.allclose(values, values[0].expand_as(values), rtol=1e-6, atol=0.0):
            varying.append(slot)
    return tuple(varying)


def read_count(run: Run, place: int, varying: Sequence[int]) -> float:
    slots = [Slot(value, divides) for value, divides in run.terms[place].slots]
    return float(count_of(slots, varying))


def _find_offset(place: int, varying: Sequence[int], splits: Sequence[Split]) -> float | None:
    """What is added to a count, such as an epsilon; None if it is no count, since it does not add up."""
    offsets = []
    for split in splits:
        whole = read_count(split.whole, place, varying)
        counts = [read_count(run, place, varying) for run in split.runs]
        missed = sum(counts) - whole
        if abs(missed) <= 1e-12 * abs(whole):
            missed = 0.0
        # A count that is kept from zero, as by clamp(min=1), is too large by what it is kept at.
        if missed and min(counts) == missed and missed <= 1 and split.runs[counts.index(missed)].is_zero:
            missed = 0.0
        if not abs(missed) <= 1e-3 * abs(whole):
            return None
        offsets.append(missed / (len(counts) - 1))
    if all(abs(offset - offsets[0]) <= 1e-3 * abs(offsets[0]) for offset in offsets):
        return offsets[0]
    return 0.0 if max(map(abs, offsets)) <= 1e-6 * abs(read_count(splits[0].whole, place, varying)) else None


def _shares(place: int, varying: Sequence[int], offset: float, splits: Sequence[Split]) -> torch.Tensor:
    shares = []
    for split in splits:
        counts = [read_count(run, place, varying) - offset for run in split.runs]
        total = sum(counts) or 1.0
        shares += [count / total for count in counts]
    return torch.tensor(shares, dtype=torch.float64)


def _describe(run: Run, place: int) -> str:
    term = run.terms[place]
    if term.name in ("NllLoss", "NllLoss2D"):
        return "its targets, or their class weights, as cross_entropy sums them"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the number that its sum is divided by"


def error_of_read(read: ReadNormalizer, split: Split, trial: Trial) -> float:
    if read.term is None:
        return split.error([1.0] * len(split.runs), gradient_floor(trial))
    places = read.varying[read.term]
    counts: list[float] = []
    for run in split.runs:
        count = read_count(run, read.term, places) - read.offset
        is_empty = count <= 1 and run.is_zero  # kept from zero, as by clamp(min=1)
        counts.append(0.0 if is_empty else count)
    total = sum(counts) or 1.0
    return split.error([count / total for count in counts], gradient_floor(trial))


def gradient_floor(trial: Trial) -> float:
    """Gradients that are smaller than this share of the average one are mostly rounding."""
    if trial.precise:
        return 1e-4
    return 0.3 if trial.rounding else 1e-2
