"""Find how a logged value is combined from the values of its micro-batches."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lightning_fasttrain.data.normalizer.classify_terms import list_rules
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.split_rule import LogRule, LossSplit
from lightning_fasttrain.data.normalizer.trial.runs import Run, Trial

_ROUNDING = 2e-5
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
        >>> from lightning_fasttrain.data.normalizer.trial.runs import LoggedValue
        >>> from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
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
        is_loss = all(_is_near(trial.whole.logged[name].value, trial.whole.loss, 1.0, _ROUNDING) for trial in trials)
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
    split: LossSplit, name: str, rules: Iterable[LogRule], trials: Sequence[Trial], rounding: float = _ROUNDING
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
        shares: list[float] = []
        for weight, run in zip(weights, logging, strict=True):
            if weight:  # a micro-batch without counted elements has a mean of NaN
                shares.append(weight / total * run.logged[name].value)
        # A small difference of large numbers, such as a divergence, has few exact digits.
        size = max([rounding * abs(trial.whole.loss), *map(abs, shares)])
        if not total or not _is_near(sum(shares), trial.whole.logged[name].value, size, rounding):
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
