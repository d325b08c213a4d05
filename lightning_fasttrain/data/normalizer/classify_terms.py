"""Classify the divisors in a loss as normalizers or constant factors, and find the rules that count them."""

from collections.abc import Sequence

import torch

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.data.normalizer.count_targets import CountRule, CountTargets, is_sum, weights_of
from lightning_fasttrain.data.normalizer.read_normalizers import Slot
from lightning_fasttrain.data.normalizer.split_rule import ReadNormalizer, count_of
from lightning_fasttrain.data.normalizer.trial.runs import Run, Split
from lightning_fasttrain.data.normalizer.trial.try_split import Trial


def list_rules(trial: Trial, preferred: CountRule | None) -> list[CountRule]:
    """Return counting rules, the likeliest first."""
    ignored = sorted(_may_be_ignored(trial) - {-100})
    terms = trial.whole.terms if trial.whole is not None else ()
    read = [term.ignored for term in terms if term.ignored is not None]
    first = [CountRule(name, index) for index in read for name in ("targets", "next_tokens")]
    usual = [*first, CountRule("targets"), CountRule("next_tokens"), CountRule("samples"), CountRule("sum")]
    others = [CountRule(name, index) for index in ignored for name in ("targets", "next_tokens")]
    return list(dict.fromkeys([*([preferred] if preferred is not None else []), *usual, *others]))


def _may_be_ignored(trial: Trial) -> set[int]:
    """Return labels that may be ignored: the smallest, largest and most frequent of the samples, and the usual ones."""
    found: set[int] = set()
    for micro_batch in trial.splits[0].micro_batches if trial.splits else ():
        labels = find_labels(micro_batch)[1]
        if labels is not None and labels.numel() > 0:
            values, frequencies = labels.cpu().unique(return_counts=True)
            found |= {int(values[0]), int(values[-1]), int(values[frequencies.argmax()])}
            # 0 is padding in text, 255 a void class in segmentation; -1 is used in both.
            found |= {value for value in (0, -1, 255) if bool((values == value).any())}
    return found


def rules_that_give(read: ReadNormalizer, trial: Trial, preferred: CountRule | None) -> list[CountRule]:
    """Return the counting rules that are proportional to the read normalizer in every micro-batch and sample."""
    if read.term is None:
        return []
    scales = {rule: _scale_or_none(read, rule, trial) for rule in list_rules(trial, preferred)}
    fitting = [rule for rule, scale in scales.items() if scale is not None]
    return sorted(fitting, key=lambda rule: abs(scales[rule] - 1) > _SURE)  # pyright: ignore[reportOptionalOperand]


def scale_of(read: ReadNormalizer, rule: CountTargets, trial: Trial) -> float:
    scale = _scale_or_none(read, rule, trial)
    return 1.0 if scale is None else scale


def _scale_or_none(read: ReadNormalizer, rule: CountTargets, trial: Trial) -> float | None:
    assert read.term is not None
    if is_sum(rule):
        return None
    scale: float | None = None
    for split in trial.splits:
        for micro_batch, run in zip(split.micro_batches, split.runs, strict=True):
            try:
                counted = float(rule(micro_batch))
            except ValueError:
                return None  # the rule does not apply to such batches
            count = read_count(run, read.term, read.varying[read.term]) - read.offset
            if counted == 0 and (count == 0 or run.is_zero):
                continue
            if counted == 0 or not torch.isclose(torch.tensor(count / counted), torch.tensor(scale or count / counted)):
                return None
            scale = scale or count / counted
    return scale


def error_of_rule(rule: CountTargets, trial: Trial) -> float:
    errors = []
    for split in trial.splits:
        try:
            counts, total = weights_of(rule, split.micro_batches)
        except ValueError:
            if isinstance(rule, CountRule):
                return float("inf")  # the rule does not apply to such batches
            raise
        # If the total is 0, each count is 0, and so is each weight.
        weights = [float(count) / max(float(total), 1e-30) for count in counts]
        errors.append(split.error(weights, gradient_floor(trial)))
    return max(errors)


_SURE = 1e-5
_UNREADABLE = {
    "nonlinear": "the loss is not a sum over samples ({} of a mean or sum)",
    "opaque": "the graph of the loss does not show its divisor ({})",
}
_NOTHING = "1 (the loss is a sum over samples)"


def classify_terms(splits: Sequence[Split]) -> ReadNormalizer | str:
    """Return which of the values read from the graphs weights micro-batches, or the reason why none does."""
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
            return f"the divisor of {first.terms[place].name} does not add up over samples"
        offsets[place] = offset
    if not normalized:
        return ReadNormalizer(first.structure, None, (), varying, 0.0, None, _NOTHING)
    # A penalty on weights is the same in each micro-batch, whose weights add up to 1.
    if not all(term.of_parameters for place, term in enumerate(first.terms) if place not in normalized):
        return "the loss adds a sum over samples to a mean"
    shares = [_shares(place, varying[place], offsets[place], splits) for place in normalized]
    if not all(torch.allclose(shares[0], share, rtol=1e-5, atol=1e-8) for share in shares):
        return "the loss has several normalizers"
    term, *same = normalized
    summed = _find_summed(term, varying[term], offsets[term], runs)
    return ReadNormalizer(first.structure, term, tuple(same), varying, offsets[term], summed, _describe(first, term))


def _find_unreadable(runs: Sequence[Run]) -> str:
    """Return why terms cannot be compared over these runs; empty if they can."""
    terms = runs[0].terms
    if not terms:
        return "the loss has no autograd graph"
    if any(run.structure != runs[0].structure for run in runs):
        return "the loss consists of different terms for different samples"
    unreadable = [term for term in terms if term.kind in _UNREADABLE]
    return _UNREADABLE[unreadable[0].kind].format(unreadable[0].name) if unreadable else ""


def classify_alone(run: Run) -> ReadNormalizer | None:
    """Return the likely normalizer of a loss that cannot be compared with another: its reduction is over samples."""
    if len(run.terms) != 1 or run.terms[0].kind not in ("mean", "sum", "quotient"):
        return None
    term = run.terms[0]
    divisors = [place for place, (_, divides) in enumerate(term.slots) if divides]
    if not divisors:
        return ReadNormalizer(run.structure, None, (), ((),), 0.0, None, _NOTHING)
    varying = (tuple(divisors[-1:]),)
    return ReadNormalizer(run.structure, 0, (), varying, 0.0, None, _describe(run, 0))


def _find_summed(place: int, varying: Sequence[int], offset: float, runs: Sequence[Run]) -> float | None:
    """Return the ratio of the number of summed elements to the divisor; None where they are not proportional."""
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
    """Whether a mean is multiplied by the same value that it was divided by."""
    if len({runs[0].terms[place].slots[slot][1] for slot in varying}) < 2:
        return False  # there is no multiplier, or no divisor
    counts = [read_count(run, place, varying) for run in runs]
    seen = [count for count in counts if count]  # 0 where no element counts
    return bool(seen) and max(seen) - min(seen) <= _SURE * max(seen)


def _find_varying(place: int, runs: Sequence[Run]) -> tuple[int, ...]:
    """Return the factors of a term that depend on the samples."""
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
    """Return the constant added to a count, such as an epsilon; None if the value does not add up like a count."""
    offsets = []
    for split in splits:
        whole = read_count(split.whole, place, varying)
        counts = [read_count(run, place, varying) for run in split.runs]
        missed = sum(counts) - whole
        if abs(missed) <= 1e-12 * abs(whole):
            missed = 0.0
        # A count that is kept from zero, as by clamp(min=1), is too large by the difference.
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
        return "its number of targets, or the sum of their class weights (cross_entropy)"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the divisor of its sum"


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
    """Return the share of the average gradient below which gradients are mostly rounding."""
    if trial.precise:
        return 1e-4
    return 0.3 if trial.rounding else 1e-2
