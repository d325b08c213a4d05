"""Find the counting rules that reproduce a loss's normalizer without running the model."""

import torch

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.data.normalizer.classify_terms import gradient_floor, read_count
from lightning_fasttrain.data.normalizer.count_targets import CountRule, CountTargets, is_sum, weights_of
from lightning_fasttrain.data.normalizer.split_rule import ReadNormalizer
from lightning_fasttrain.data.normalizer.trial.try_split import Trial

_SURE = 1e-5


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
