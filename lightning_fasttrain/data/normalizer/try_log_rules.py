"""Find by which rule a logged value is combined, from what the step logged on samples and on their micro-batches."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_fasttrain.data.normalizer.classify_terms import list_rules, read_count
from lightning_fasttrain.data.normalizer.count_targets import is_sum
from lightning_fasttrain.data.normalizer.log_rules import FoundRule, LoggedRun, find_log_rules, settle_rivals
from lightning_fasttrain.data.normalizer.split_rule import LossSplit
from lightning_fasttrain.data.normalizer.trial.runs import Run
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, Trial, try_split


def settle_log_rules(
    split: LossSplit, names: Iterable[str], stage: Stage, samples: Iterable[Sample]
) -> dict[str, FoundRule | None]:
    """Run further samples until they decide by which rule some logged values are combined.

    Args:
        split: the split, with the rules that matched these values so far.
        names: names of the values.
        stage: where the step runs.
        samples: samples on which the step runs, unsplit and in micro-batches.
    """
    found = {name: split.log_rules[name] for name in names}
    for sample in samples:
        runs = list_logged(split, [try_split(stage, iter([sample]))])
        for name, rule in found.items():
            found[name] = None if rule is None else settle_rivals(name, rule, runs)
        if all(rule is None or rule.is_sure for rule in found.values()):
            break
    return found


def find_log_rules_of(split: LossSplit, trials: Sequence[Trial]) -> dict[str, FoundRule | None]:
    rules = [rule for rule in list_rules(trials[0], None) if not is_sum(rule)]
    return find_log_rules(list_logged(split, trials), rules)


def list_logged(split: LossSplit, trials: Sequence[Trial]) -> list[tuple[LoggedRun, list[LoggedRun]]]:
    """Return what each sample and its micro-batches logged."""

    def as_logged(batch: Any, run: Run) -> LoggedRun:
        count: float | None = None
        if split.read is not None and split.read.term is not None:
            count = read_count(run, split.read.term, split.read.varying[split.read.term])
        elif callable(split.count) and not is_sum(split.count):
            count = float(split.count(batch))
        return LoggedRun(batch, run.loss, count, run.logged)

    splits: list[tuple[LoggedRun, list[LoggedRun]]] = []
    for trial in trials:
        for one in trial.splits:
            micro_batches = [
                as_logged(micro_batch, run) for micro_batch, run in zip(one.micro_batches, one.runs, strict=True)
            ]
            splits.append((as_logged(trial.sample.whole, one.whole), micro_batches))
    return splits
