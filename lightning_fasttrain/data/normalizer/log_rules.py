"""Find how a logged value is combined from the values of its micro-batches."""

from collections.abc import Iterable, Mapping, Sequence

from lightning_fasttrain.data.normalizer.classify_terms import list_rules
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.split_rule import LogRule, LossSplit
from lightning_fasttrain.data.normalizer.trial.runs import Run, Trial
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_split

_ROUNDING = 2e-5
OWN, LOSS = "own", "loss"  # the divisor that its own graph shows, and the normalizer of the loss
SAMPLES, SUM = CountRule("samples"), CountRule("sum")
LogRules = Mapping[str, tuple[LogRule, ...]]


def find_log_rules(split: LossSplit, trials: Sequence[Trial]) -> dict[str, tuple[LogRule, ...]]:
    """Return, for each logged name, the rules that give the unsplit value from those of the micro-batches.

    Args:
        split: how the loss is split.
        trials: runs on some samples and on their micro-batches.

    Returns:
        The rules of each name, the likeliest first: several where the samples cannot decide, none where no rule does.

    Example:
        >>> import torch
        >>> from lightning_fasttrain.data.normalizer.trial.runs import LoggedValue
        >>> runs = [Run(torch.zeros(n), 1.0, logged={"rows": LoggedValue(float(n), None)}) for n in (3, 1, 2)]
        >>> find_log_rules(LossSplit(None, None), [Trial(Sample(runs[0].batch, 3, []), runs[0], [runs[1:]])])
        {'rows': (CountRule(name='sum', ignore_index=-100),)}
    """
    if not trials[0].splits:
        return {}
    counting = list_rules(trials[0])
    by_samples = [rule for rule in counting if rule == SAMPLES]
    others = [rule for rule in counting if rule not in (SAMPLES, SUM)]
    found: dict[str, tuple[LogRule, ...]] = {}
    for name in trials[0].whole.logged:
        if not all(name in run.logged for trial in trials for run in trial.runs):
            continue
        values = [(trial.whole.logged[name].value, trial.whole.loss) for trial in trials]
        is_loss = all(_is_near(value, loss, 1.0, _ROUNDING) for value, loss in values)
        likely = [LOSS, *by_samples] if is_loss else [*by_samples, LOSS]
        rules = match_log_rules(split, name, [OWN, *likely, *others, SUM], trials)
        if OWN in rules or is_loss:
            rules = rules[:1]  # its graph shows its divisor, or it is the loss: others match by chance
        found[name] = rules
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


def settle_log_rules(
    split: LossSplit, names: Iterable[str], stage: Stage, samples: Iterable[Sample]
) -> dict[str, tuple[LogRule, ...]]:
    """Run further samples until at most one of the rules that matched some values so far is left.

    Args:
        split: the split, with the rules that matched so far.
        names: names of the values.
        stage: where the step runs.
        samples: samples on which the step runs, unsplit and in micro-batches.
    """
    found = {name: split.log_rules[name] for name in names}
    for sample in samples:
        trial = try_split(stage, iter([sample]))
        for name, rules in found.items():
            found[name] = match_log_rules(split, name, rules, [trial])
        if all(len(rules) < 2 for rules in found.values()):
            break
    return found


def merge_log_rules(before: LogRules, now: LogRules) -> dict[str, tuple[LogRule, ...]]:
    """Merge what two batches show: if only one of them decides between rules, its rule is used.

    Example:
        >>> tie, sure = ("samples", "loss"), ("loss",)
        >>> merge_log_rules({"accuracy": tie, "loss": sure}, {"accuracy": sure, "loss": tie})
        {'accuracy': ('loss',), 'loss': ('loss',)}
    """
    merged = {**before, **now}
    for name, rules in before.items():
        later_decides = len(now.get(name, ())) == 1
        if len(rules) == 1 or (rules and not later_decides):
            merged[name] = rules
    return merged


def _fits(split: LossSplit, name: str, rule: LogRule, trial: Trial, rounding: float) -> bool:
    """Whether a rule gives the unsplit value of a name; also where the samples did not log it."""
    if name not in trial.whole.logged:
        return True
    expected = trial.whole.logged[name].value
    for runs in trial.splits:
        total, combined, size = 0.0, 0.0, 0.0
        for run in runs:
            weight = _weight(split, name, rule, run) if name in run.logged else 0.0
            if weight is None:
                return False
            total += weight
            if weight:  # a micro-batch without counted elements has a mean of NaN
                combined += weight * run.logged[name].value
                size = max(size, abs(weight * run.logged[name].value))
        total = 1.0 if rule == SUM else total  # a sum is not divided
        # A small difference of large numbers, such as a divergence, has few exact digits.
        size = max(size, rounding * abs(trial.whole.loss * total))
        if not total or not _is_near(combined / total, expected, size / total, rounding):
            return False
    return True


def _weight(split: LossSplit, name: str, rule: LogRule, run: Run) -> float | None:
    """Return the weight of a micro-batch by a rule; None where the rule does not apply."""
    if isinstance(rule, CountRule):
        return float(rule(run.batch))
    return run.logged[name].divisor if rule == OWN else split.count_in(run)


def _is_near(one: float, other: float, size: float, rounding: float) -> bool:
    return abs(one - other) <= rounding * max(abs(size), abs(other), 1e-30)
