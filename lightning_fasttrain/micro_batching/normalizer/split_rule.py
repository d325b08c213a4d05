"""Rules that split the loss and logged values of a batch, by normalizers that are read or targets that are counted."""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.micro_batching.normalizer.count_targets import CountRule, CountTargets
from lightning_fasttrain.trial.read_normalizers import (
    Normalizers,
    Number,
    Slot,
    Term,
    count_summed,
    is_of_parameters,
    multiply,
    read_normalizers,
    scalar_on,
)
from lightning_fasttrain.trial.runs import ReadTerm, Run, Trial

LogRule = str | CountRule
_ROUNDING = 1e-4  # readings of one normalizer differ by less, distinct normalizers eventually by more


class OtherSplitError(Exception):
    """Raised when a micro-batch's loss has other terms or other normalizers than the samples that were tried."""


@dataclass(frozen=True)
class Reading:
    """The information about its weight in one micro-batch's loss.

    Attributes:
        divisor: the divisor of the loss; None where it is a sum.
        count: how much of the divisor this micro-batch counts: less where a divisor is clamped away from zero.
        others: the divisors of the other terms, which must be proportional to it.
        factors: values that must be the same in all micro-batches of a step.
        nodes: the reductions, through which a micro-batch without targets must send no NaN.
        unclear: whether the count cannot be determined; on the device, if necessary.
    """

    divisor: Number | None = None
    count: Number | None = None
    others: tuple[Number, ...] = ()
    factors: tuple[Number, ...] = ()
    nodes: tuple[Any, ...] = ()
    unclear: bool | Tensor = False
    is_nothing: bool = False  # a loss without a gradient


_NOTHING = Reading(divisor=0.0, count=0.0, is_nothing=True)


@dataclass(frozen=True)
class ReadNormalizer:
    """Read a micro-batch's weight from its own loss, as found from a few samples.

    Attributes:
        structure: the structure of the losses that it applies to.
        varying: for each term, the indices of its slots that depend on the samples; the others are factors.
        term: the term whose normalizer is the weight; None where the loss is a sum.
        others: terms whose normalizer is proportional to it.
        offset: the constant added to a count, such as an epsilon.
        summed: the ratio of the number of summed elements to the divisor; None where the graph does not show it.
        name: the normalizer in words.
        is_absolute: whether the count is the product of all divisors, none of which is a constant factor.
        is_of_whole_batches: whether batches are unsplit, so that one with other terms shows its own weight.
    """

    structure: tuple[str, ...]
    varying: tuple[tuple[int, ...], ...]
    term: int | None = None
    others: tuple[int, ...] = ()
    offset: float = 0.0
    summed: float | None = None
    name: str = field(default="1 (the loss is a sum over samples)", compare=False)
    is_absolute: bool = field(default=False, compare=False)
    is_of_whole_batches: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.name

    def count_in(self, run: Run) -> float:
        """Return the count that the loss of a run shows, in Python numbers."""
        assert self.term is not None
        term = run.terms[self.term]
        divisor = float(count_of(term.slots, self.varying[self.term]))
        if term.summed == 0 and divisor <= 1:
            return 0.0  # the divisor is kept from zero, as by clamp(min=1)
        return divisor - self.offset

    def read(self, loss: Tensor) -> Reading:
        """Raises: OtherSplitError: the loss was computed by other operations, or its count cannot be determined."""
        read = read_normalizers(loss)
        if read.structure != self.structure:
            if read.counts_nothing and float(loss.detach()) == 0:
                return _NOTHING
            if self.is_of_whole_batches:
                return read_whole_batch(read, loss)
            raise OtherSplitError("its loss has other terms than that of the samples that were tried")
        factors: list[Number] = []
        for term, varying in zip(read.terms, self.varying, strict=True):
            factors += [on_host(slot.value) for place, slot in enumerate(term.slots) if place not in varying]
        if self.term is None:
            return Reading(factors=tuple(factors))
        term = read.terms[self.term]
        divisor = count_of(term.slots, self.varying[self.term])
        others = tuple(count_of(read.terms[place].slots, self.varying[place]) for place in self.others)
        # The other reductions send no NaN: a mean over nothing has no gradient.
        nodes = tuple(one.node for one in read.terms if one.kind in ("sum", "quotient"))
        count, unclear = self._count(term, divisor, loss.detach(), has_others=len(read.terms) > 1)
        return Reading(divisor, count, others, tuple(factors), nodes, unclear)

    def _count(self, term: Term, divisor: Number, loss: Tensor, *, has_others: bool) -> tuple[Number, bool | Tensor]:
        """Return the count, and whether it cannot be determined."""
        count = divisor - self.offset if self.offset else divisor
        if term.kind == "mean" or (isinstance(divisor, float | int) and divisor > 1):
            return count, False
        if self.summed is not None and (summed := count_summed(term.node)) is not None:
            counted = on_host(summed) * self.summed
            # The divisor may also be the count 0, kept from zero.
            return counted, differ(count, counted) & (counted != 0)
        if self.is_of_whole_batches:
            return _count_of_quotient(count, loss, has_others)
        # It may be clamped away from zero, as by clamp(min=1), or be zero beside a nonzero sum.
        unclear = loss.isinf() | ((divisor > 0) & (divisor <= 1))
        if unclear.device.type == "cpu":
            return count, bool(unclear)
        return count, unclear


def _count_of_quotient(count: Number, loss: Tensor, has_others: bool) -> tuple[Number, bool | Tensor]:
    """Return the count that the divisor of a whole batch shows, and whether it cannot be determined.

    A divisor of at most 1 may be kept from zero, as by ``clamp(min=1)``: then it counts nothing if the loss is zero,
    which other terms would hide. Where it is not, one target counts.
    """
    precision = torch.float64 if loss.device.type == "cpu" else torch.float32
    counted = scalar_on(loss.device, count, precision)
    is_small = (counted > 0) & (counted <= 1)
    unclear = loss.isinf() | (is_small & has_others)
    counted = torch.where(is_small & (loss == 0), 0.0, counted)
    if loss.device.type == "cpu":
        return float(counted), bool(unclear)
    return counted, unclear


@dataclass(frozen=True)
class WholeBatchNormalizer(ReadNormalizer):
    """Weight a batch among others by the divisors of its own loss, where samples of it show nothing by themselves.

    Means and quotients show what they are divided by. A constant among the divisors is in all batches, and cancels.
    """

    structure: tuple[str, ...] = ()
    varying: tuple[tuple[int, ...], ...] = ()
    term: int | None = 0
    name: str = field(default="the divisor of its loss", compare=False)

    def read(self, loss: Tensor) -> Reading:
        """Raises: OtherSplitError: the loss is no mean, or its terms have several divisors."""
        return read_whole_batch(read_normalizers(loss), loss)


def read_whole_batch(read: Normalizers, loss: Tensor) -> Reading:
    """Read the weight of an unsplit batch from its loss. Raises: as :meth:`WholeBatchNormalizer.read`."""
    terms = [term for term in read.terms if not (term.trains_nothing or is_of_parameters(term.node))]
    if not terms:
        return _NOTHING
    for term in terms:
        if term.kind in _UNREADABLE:
            raise OtherSplitError(_UNREADABLE[term.kind].format(term.name))
        if term.kind not in ("mean", "quotient"):
            raise OtherSplitError("the loss has a term that is not divided by anything")
    divisor, differs = _find_common_divisor(list(map(_list_divisors, terms)))
    nodes = tuple(term.node for term in terms if term.kind == "quotient")
    if not nodes or (isinstance(divisor, float | int) and divisor > 1):
        return Reading(divisor, divisor, nodes=nodes, unclear=differs)
    count, unclear = _count_of_quotient(divisor, loss.detach(), has_others=len(read.terms) > 1)
    return Reading(divisor, count, nodes=nodes, unclear=unclear | differs)


def _list_divisors(term: Term) -> list[Number]:
    return [on_host(slot.value) for slot in term.slots if slot.divides]


def _find_common_divisor(divisors: Sequence[Sequence[Number]]) -> tuple[Number, bool | Tensor]:
    """Return what the terms of a loss are divided by, from the outside to the inside; and whether they differ.

    Raises: OtherSplitError: they do.
    """
    products = [functools.reduce(multiply, values) for values in divisors]
    if any(isinstance(product, Tensor) for product in products):
        differs: bool | Tensor = False
        for product in products[1:]:
            differs = differs | differ(product, products[0])
        return products[0], differs
    # Means of each sample's mean, as over images of several sizes, have the number of samples in common.
    for candidates in (products, [values[0] for values in divisors]):
        if not any(differ(each, candidates[0]) for each in candidates):
            return candidates[0], False
    raise OtherSplitError("the loss of this batch has several normalizers")


def count_of(slots: Sequence[Slot], varying: Sequence[int]) -> Number:
    """Return the normalizer of a term: the product of its varying divisors, over that of its varying factors."""
    count: Number = 1
    for place in varying:
        value = on_host(slots[place].value)
        if slots[place].divides:
            count = multiply(count, value)
        elif isinstance(value, float | int) and value == 0:
            return 0
        else:
            count = count / value
    return count


def on_host(value: Number) -> Number:
    """Return the value as a Python number, unless that would wait for a device."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return float(value)
    return value


def differ(one: Number, other: Number) -> bool | Tensor:
    """Whether two numbers differ by more than rounding: a tensor if one of them is on a device."""
    if not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        return one != other and not abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
    device = one.device if isinstance(one, Tensor) else other.device  # pyright: ignore[reportAttributeAccessIssue]
    one, other = (scalar_on(device, number, torch.float32) for number in (one, other))
    return (one - other).abs() > _ROUNDING * torch.maximum(one.abs(), other.abs())


@dataclass
class LossSplit:
    """The rule that splits a loss into the losses of its micro-batches.

    Attributes:
        read: how the weight of a micro-batch is read from its loss; None where the user's ``count`` gives it, or it
            cannot be read.
        count: the function that gives the weights without running the model; None where it is not known.
        scale: the ratio of the read normalizer to the count.
        provisional: whether the samples showed nothing, so that others must be tried.
        per_sample: the approximate count per sample.
        log_rules: for each value that the step logs, the rules that combine it, the likeliest first: several where the
            samples could not decide, none where no rule gives the value of the unsplit samples.
        leaves: the leaf tensors of the samples' loss.
    """

    read: ReadNormalizer | None
    count: CountTargets | None
    scale: float = 1.0
    provisional: bool = field(default=False, compare=False)
    per_sample: float = field(default=1.0, compare=False)
    log_rules: dict[str, tuple[LogRule, ...]] = field(default_factory=dict, compare=False)
    leaves: tuple["weakref.ref[Tensor]", ...] = field(default=(), compare=False)

    @property
    def parameters(self) -> list[Tensor]:
        """The leaf tensors that the loss has gradients for, as far as they still exist."""
        leaves = [reference() for reference in self.leaves]
        return list(filter(torch.is_tensor, leaves))

    @property
    def is_sum(self) -> bool:
        """Whether the losses of micro-batches are added unweighted."""
        if self.read is not None:
            return self.read.term is None
        return self.count == CountRule("sum")

    @property
    def counts_nothing(self) -> bool:
        """Whether the samples showed neither a gradient nor a divisor that depends on them, as without targets."""
        return self.provisional and self.read is not None and self.is_sum

    def counts_as(self, other: object) -> bool:
        """Whether weights by another split can be added to those by this one."""
        if not isinstance(other, LossSplit) or self.scale != 1:
            return False
        return self.counts_nothing or self.is_sum == other.is_sum

    def count_in(self, run: Run) -> float | None:
        """Return the count of a run by this rule; None where losses are added unweighted, or it does not apply."""
        if self.is_sum or (self.read is not None and run.structure != self.read.structure):
            return None
        if self.read is not None:
            return self.read.count_in(run)
        if self.count is None:
            return None
        return float(self.count(run.batch))

    def list_weights(self, runs: Sequence[Run]) -> list[float]:
        """Return the weights of the runs of all micro-batches of a batch."""
        counts = [self.count_in(run) or 0.0 for run in runs]
        if self.is_sum:
            return [1.0] * len(runs)
        total = sum(counts) or 1.0
        return [count / total for count in counts]

    def __str__(self) -> str:
        if self.read is not None:
            return str(self.read)
        if isinstance(self.count, CountRule):
            return str(self.count)
        return "count="


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
    micro_batches = _without_empty_runs(trial).runs[1:]
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

    What adds up over samples is a normalizer, whether the loss counts it or the batch brings it; what is the same for
    all samples, such as a constant or a total of the batch, is a factor.
    """
    trial = _without_empty_runs(trial)
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
    assert first.term is not None
    used = varying[first.term]
    constants = [slot for place, slot in enumerate(terms[first.term].slots) if slot.divides and place not in used]
    return replace(first, others=tuple(places[1:]), is_absolute=all(slot.value == 1 for slot in constants))


def _without_empty_runs(trial: Trial) -> Trial:
    """Leave out micro-batches without weight, by another loss such as ``0 * logits.sum()`` without targets."""
    structure = trial.whole.structure
    splits: list[list[Run]] = []
    for runs in trial.splits:
        splits.append([run for run in runs if run.structure == structure or not run.counts_nothing])
    return replace(trial, splits=splits)


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
        if len(counts) < 2:
            continue
        offsets.append(missed / (len(counts) - 1))  # the sum holds the constant once per micro-batch
    if all(abs(offset - offsets[0]) <= 1e-3 * abs(offsets[0]) for offset in offsets):
        return next(iter(offsets), 0.0)
    if max(map(abs, offsets)) <= 1e-6 * abs(whole):
        return 0.0
    return None


def _describe(term: ReadTerm) -> str:
    if term.name in ("NllLoss", "NllLoss2D"):
        return "its number of targets, or the sum of their class weights (cross_entropy)"
    if term.name == "_Chunked":
        return "the number of tokens that its fused loss counts"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the divisor of its sum"


_LOG_ROUNDING = 2e-5
OWN, LOSS = "own", "loss"  # the divisor that its own graph shows, and the normalizer of the loss
SAMPLES, SUM = CountRule("samples"), CountRule("sum")
LogRules = Mapping[str, tuple[LogRule, ...]]


def find_log_rules(split: LossSplit, trials: Sequence[Trial], before: LogRules) -> dict[str, tuple[LogRule, ...]]:
    """Return, for each logged name, the rules that give the unsplit value from those of the micro-batches.

    Args:
        split: how the loss is split.
        trials: runs on some samples and on their micro-batches.
        before: the rules that earlier batches have shown, of which these samples may refute some.

    Returns:
        The rules of each name, the likeliest first: several where no samples could decide, none where no rule does.

    Example:
        >>> import torch
        >>> from lightning_fasttrain.trial.runs import LoggedValue
        >>> from lightning_fasttrain.trial.sample_rows import Sample
        >>> runs = [Run(torch.zeros(n), 1.0, logged={"rows": LoggedValue(float(n), None)}) for n in (3, 1, 2)]
        >>> find_log_rules(LossSplit(None, None), [Trial(Sample(runs[0].batch, 3, []), runs[0], [runs[1:]])], {})
        {'rows': (CountRule(name='sum', ignore_index=-100),)}
    """
    found = dict(before)
    if not trials[0].splits:
        return found
    counting = list_rules(trials[0], preferred=SAMPLES)
    for name in trials[0].whole.logged:
        if not all(name in run.logged for trial in trials for run in trial.runs):
            continue
        is_loss = all(
            _is_near(trial.whole.logged[name].value, trial.whole.loss, 1.0, _LOG_ROUNDING) for trial in trials
        )
        rules = before.get(name, (OWN, counting[0], LOSS, *counting[1:]))
        matching = match_log_rules(split, name, rules, trials) or before.get(name, ())
        # Where its graph shows its divisor, or it is the loss, others match by chance.
        if OWN in matching:
            matching = (OWN,)
        elif is_loss and LOSS in matching:
            matching = (LOSS,)
        found[name] = matching
    return found


def match_log_rules(
    split: LossSplit, name: str, rules: Iterable[LogRule], trials: Sequence[Trial], rounding: float = _LOG_ROUNDING
) -> tuple[LogRule, ...]:
    """Return those of the rules that give the unsplit value of a name in all trials that logged it.

    Args:
        split: how the loss is split.
        name: name of the value.
        rules: rules to try.
        trials: runs on some samples and on their micro-batches.
        rounding: relative difference that counts as rounding.
    """
    found: list[LogRule] = []
    for rule in rules:
        if all(_fits(split, name, rule, trial, rounding) for trial in trials):
            found.append(rule)
    return tuple(found)


def _fits(split: LossSplit, name: str, rule: LogRule, trial: Trial, rounding: float) -> bool:
    """Whether a rule gives the unsplit value of a name; also where the samples did not log it."""
    if name not in trial.whole.logged:
        return True
    for runs in trial.splits:
        logging = [run for run in runs if name in run.logged]
        weights = [_weight(split, name, rule, run) for run in logging]
        total = 1.0 if rule == SUM else sum(weights)  # a sum is not divided
        if total == 0:
            continue  # samples without counted elements show nothing
        shares: list[float] = []
        for weight, run in zip(weights, logging, strict=True):
            if weight:  # a micro-batch without counted elements has a mean of NaN
                shares.append(weight / total * run.logged[name].value)
        # A small difference of large numbers, such as a divergence, has few exact digits.
        size = max(map(abs, shares), default=0.0)
        if math.isfinite(trial.whole.loss):  # a mean over no targets is not
            size = max(size, rounding * abs(trial.whole.loss))
        if not _is_near(sum(shares), trial.whole.logged[name].value, size, rounding):
            return False
    return True


def _weight(split: LossSplit, name: str, rule: LogRule, run: Run) -> float:
    """Return the weight of a micro-batch by a rule; NaN where the rule does not apply."""
    if isinstance(rule, CountRule):
        return float(rule(run.batch))
    weight = split.count_in(run)
    if rule == OWN:
        weight = run.logged[name].divisor
    return math.nan if weight is None else weight


def _is_near(one: float, other: float, size: float, rounding: float) -> bool:
    return abs(one - other) <= rounding * max(abs(size), abs(other), 1e-30)
