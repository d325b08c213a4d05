"""Find how a logged value is combined from the values of its micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.read_normalizers import read_normalizers

_ROUNDING = 2e-5
OWN, LOSS, SAMPLES, SUM = "own", "loss", "samples", "sum"


@dataclass(frozen=True)
class LoggedValue:
    """A scalar that a step logged.

    Attributes:
        value: the value.
        divisor: the divisor shown by its graph; None where it has no graph, or is not a mean.
    """

    value: float
    divisor: float | None


@dataclass(frozen=True)
class LoggedRun:
    """The values that a step logged in one run on some samples.

    Attributes:
        batch: the samples.
        loss: the value of the loss.
        count: the normalizer of the loss; None where it is not a weighted mean.
        values: maps names to logged values.
    """

    batch: Any
    loss: float
    count: float | None
    values: dict[str, LoggedValue]


LogRule = str | CountRule


@dataclass(frozen=True)
class FoundRule:
    """The rule by which a value is combined.

    Attributes:
        rule: the likeliest of the rules that give the value of the unsplit samples.
        rivals: the other rules that do, where the samples cannot decide.
    """

    rule: LogRule
    rivals: tuple[LogRule, ...] = ()

    @property
    def is_sure(self) -> bool:
        """Whether no other rule gives the value."""
        return not self.rivals


def own_divisor(value: Tensor) -> Number | None:
    """Return the divisor that the graph of a logged value shows.

    Example:
        >>> import torch
        >>> own_divisor(torch.ones(3, 2, requires_grad=True).mean())
        6
    """
    terms = read_normalizers(value).terms
    if not terms or any(term.kind not in ("mean", "quotient") for term in terms):
        return None
    # The terms of a loss share one normalizer, except for constant factors, which cancel.
    return terms[0].normalizer


def find_log_rules(
    splits: Sequence[tuple[LoggedRun, Sequence[LoggedRun]]], rules: Sequence[CountRule]
) -> dict[str, FoundRule | None]:
    """Return, for each name, how its values combine over micro-batches; None where no rule gives the unsplit value.

    Args:
        splits: runs on some samples, and on the micro-batches that they were split into.
        rules: counting rules to try.

    Example:
        >>> import torch
        >>> whole = LoggedRun(torch.zeros(3), 1.0, None, {"rows": LoggedValue(3.0, None)})
        >>> runs = [LoggedRun(torch.zeros(n), 1.0, None, {"rows": LoggedValue(float(n), None)}) for n in (1, 2)]
        >>> find_log_rules([(whole, runs)], [])
        {'rows': FoundRule(rule='sum', rivals=())}
    """
    names = [name for whole, _ in splits[:1] for name in whole.values]
    found: dict[str, FoundRule | None] = {}
    for name in names:
        if not all(name in run.values for whole, micro_batches in splits for run in (whole, *micro_batches)):
            continue
        is_loss = all(_is_near(whole.values[name].value, whole.loss, 1.0) for whole, _ in splits)
        usual: list[LogRule] = [OWN, LOSS, SAMPLES] if is_loss else [OWN, SAMPLES, LOSS]
        fitting = [rule for rule in (*usual, *rules, SUM) if _fits_all(name, rule, splits)]
        found[name] = _choose(fitting)
        if found[name] is not None and (fitting[0] == OWN or is_loss):
            found[name] = FoundRule(fitting[0])
    return found


def settle_rivals(
    name: str,
    found: FoundRule,
    splits: Sequence[tuple[LoggedRun, Sequence[LoggedRun]]],
    rounding: float = _ROUNDING,
) -> FoundRule | None:
    """Keep the rules of a name that also give the values of further runs; None where none does.

    Args:
        name: name of the value.
        found: the rules that matched so far.
        splits: as for :func:`find_log_rules`.
        rounding: relative difference that counts as rounding.
    """
    telling = [(whole, micro_batches) for whole, micro_batches in splits if name in whole.values]
    return _choose([rule for rule in (found.rule, *found.rivals) if _fits_all(name, rule, telling, rounding)])


def _choose(fitting: Sequence[LogRule]) -> FoundRule | None:
    return FoundRule(fitting[0], tuple(fitting[1:])) if fitting else None


def merge_log_rules(
    before: dict[str, FoundRule | None], now: dict[str, FoundRule | None]
) -> dict[str, FoundRule | None]:
    """Merge what two batches show: if only one of them decides between rules, its rule is used.

    Example:
        >>> tie, sure = FoundRule("samples", ("loss",)), FoundRule("loss")
        >>> merge_log_rules({"accuracy": tie, "loss": sure}, {"accuracy": sure, "loss": tie})
        {'accuracy': FoundRule(rule='loss', rivals=()), 'loss': FoundRule(rule='loss', rivals=())}
    """
    merged = {**before, **now}
    for name, found in before.items():
        later = now.get(name)
        if found is not None and (found.is_sure or later is None or not later.is_sure):
            merged[name] = found
    return merged


def _fits_all(
    name: str,
    rule: LogRule,
    splits: Sequence[tuple[LoggedRun, Sequence[LoggedRun]]],
    rounding: float = _ROUNDING,
) -> bool:
    return all(_fits(name, rule, whole, micro_batches, rounding) for whole, micro_batches in splits)


def _fits(name: str, rule: LogRule, whole: LoggedRun, micro_batches: Sequence[LoggedRun], rounding: float) -> bool:
    weights = list(_weights(name, rule, micro_batches))
    values = [micro_batch.values[name].value for micro_batch in micro_batches]
    if None in weights:
        return False
    # A micro-batch without counted elements has a mean of NaN, and a weight of 0.
    products = [weight * value for weight, value in zip(weights, values, strict=True) if weight]
    total = 1.0 if rule == SUM else sum(weights)
    size = max([abs(product) for product in products], default=0.0)
    expected = whole.values[name].value
    # A small difference of large numbers, such as a divergence, has few exact digits.
    size = max(size, rounding * abs(whole.loss * total))
    return bool(total) and _is_near(sum(products) / total, expected, size / total, rounding)


def _weights(name: str, rule: LogRule, micro_batches: Sequence[LoggedRun]) -> Iterator[Any]:
    for micro_batch in micro_batches:
        if rule == OWN:
            yield micro_batch.values[name].divisor
        elif rule == LOSS:
            yield micro_batch.count
        elif rule == SUM:
            yield 1.0
        else:
            yield _count(rule, micro_batch.batch)


def _count(rule: LogRule, batch: Any) -> float | None:
    try:
        return float(rule(batch)) if isinstance(rule, CountRule) else float(batch_size(batch))
    except ValueError:
        return None


def _is_near(one: float, other: float, size: float, rounding: float = _ROUNDING) -> bool:
    return abs(one - other) <= rounding * max(abs(size), abs(other), 1e-30)
