"""Find out, on a few samples, by what the micro-batches of a loss are weighted, and check that it can be split."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_fasttrain._labels import find_labels
from lightning_fasttrain._messages import explain, list_some, say, warn
from lightning_fasttrain._ranks import rank_count
from lightning_fasttrain.data.normalizer.count_targets import (
    Count,
    CountRule,
    CountTargets,
    is_sum,
    named_count,
    weights_of,
)
from lightning_fasttrain.data.normalizer.log_rules import LoggedRun, LogRule, find_log_rules
from lightning_fasttrain.data.normalizer.read_normalizers import Slot
from lightning_fasttrain.data.normalizer.sample_rows import Sample, list_altered, sample_rows
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, ReadNormalizer, count_of
from lightning_fasttrain.data.normalizer.step_function import models_of
from lightning_fasttrain.data.normalizer.trial import Run, Split, Stage, Trial, try_split
from lightning_fasttrain.data.split_batch import batch_size

_SURE = 1e-5  # a right rule misses by less in float32, nearly always; what lies above is looked at in float64
_FLOAT32 = 1e-3
_ROUNDED = 5e-2  # where something is computed with fewer bits, and float64 cannot be had
_FLOAT64 = 1e-6  # a step may round some tensors to float32 by itself
_ALL_FLOAT64 = 1e-9
_NOTHING = "nothing: the loss is a sum, and its micro-batches are added"
_TIED = 3e-6  # errors below it are rounding, and say nothing about a rule


class CannotSplitError(ValueError):
    """A loss that is not a weighted sum of those of its micro-batches.

    Attributes:
        why: the reason, in a sentence's part.
        trial: what was tried; None where nothing was.
        otherwise: a rule that fits the samples although the loss does not show it.
    """

    def __init__(self, why: str, trial: Trial | None = None, otherwise: LossSplit | None = None, nearest: str = ""):
        self.why, self.trial, self.otherwise, self.nearest = why, trial, otherwise, nearest
        what = f"MicroBatching cannot split this loss exactly{nearest}"
        way_out = (
            "Name the submodule in which samples do not depend on one another, with through=, give count= a function "
            "(batch → the number of terms that its loss averages over), or use ActivationCheckpointing for memory"
        )
        super().__init__(explain(what, why, way_out))


def find_count(
    step: Callable[[Any], Any],
    batch: Any,
    n: int = 2,
    *,
    count: Count = "auto",
    check: bool = True,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> CountTargets:
    """Find a function that counts what a loss is divided by, before anything is computed.

    A few samples are run, unsplit and in pieces. What each loss is divided by is read from its graph (see
    :func:`~lightning_fasttrain.data.read_normalizers`), the gradient of the whole is compared with the weighted sum of
    its pieces' gradients, and the counting rules that give the numbers read are found: targets other than -100, the
    same after the shift of next-token models, other ignored labels, samples, and a plain sum. The step runs without
    dropout and with autocast off, and what it changes is restored: random states, and buffers, metrics and plain
    attributes of the models that it uses.

    :func:`~lightning_fasttrain.accumulate_gradients` and ``MicroBatching`` do this by themselves, and need no rule.

    Args:
        step: a part of the batch → its loss, or a mapping with a ``"loss"``.
        batch: anything :func:`~lightning_fasttrain.data.split_batch` takes.
        n: the number of micro-batches that batches will be split into: one of them is known to fit.
        count: a rule to check instead of finding one.
        check: False takes the nearest rule, and says how far it is off.
        no_sync: as for :func:`~lightning_fasttrain.accumulate_gradients`.

    Returns:
        batch → its weight. Pass it on as ``count=``.

    Raises:
        ValueError: the loss cannot be split, or no rule counts what it is divided by.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.randn(6, 3)
        >>> find_count(lambda x: net(x).pow(2).sum(), data)
        CountRule(name='sum', ignore_index=-100)
    """
    named = named_count(count)
    split = find_split_of(step, batch, n, count=named, check=check, no_sync=no_sync)
    if split.is_sum:
        return CountRule("sum")
    if split.count is None:
        why = f"it is divided by {split.read}, which is no number of samples or labels"
        raise CannotSplitError(f"{why}: so no rule counts it beforehand, though micro-batches can read it")
    return split.count


def find_split_of(
    step: Callable[[Any], Any],
    batch: Any,
    n: int,
    *,
    count: Count = "auto",
    check: bool = True,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    whole_batches: bool = False,
) -> LossSplit:
    """How the loss of a step function is split, found on some samples of a batch.

    Raises:
        CannotSplitError: it is not a weighted sum of those of its micro-batches.
    """
    stage = stage_of(step, no_sync)
    samples = sample_rows(batch, -(-batch_size(batch) // n))
    found = find_split(stage, samples, count, check=check, whole_batches=whole_batches)
    assert found is not None  # this stage refuses a step that returns None
    return found


def stage_of(step: Callable[[Any], Any], no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Stage:
    """Where a step function of a bare loop is tried out."""
    models = models_of(step)
    replicas = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]

    @contextmanager
    def skip_syncs() -> Iterator[None]:
        with ExitStack() as stack:
            for context in (no_sync, *(replica.no_sync for replica in replicas)):
                stack.enter_context(context())
            yield

    return Stage(step, models, skip_syncs, gradients=not any(map(is_sharded, models)))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether parameters are in pieces, so that their gradients cannot be taken beside the training's own."""
    # `ds_id` is of DeepSpeed's stage 3, `device_mesh` of DTensors.
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())


def find_split(
    stage: Stage,
    samples: Iterator[Sample],
    count: Count,
    *,
    check: bool,
    preferred: CountRule | None = None,
    together: bool = True,
    whole_batches: bool = False,
) -> LossSplit | None:
    """How the loss of a step on a given stage is split; ``preferred`` is the counting rule that is tried first.

    Args:
        together: whether all ranks call this, and decide alike.
        whole_batches: whether what is summed are batches as they come, whose statistics are their own.

    Returns:
        None where the step returned None, and nothing could be found yet.

    Raises:
        CannotSplitError: the loss is not a weighted sum of those of its micro-batches.
    """
    if callable(count) and not check:
        return LossSplit(None, count)
    trial = try_split(stage, samples)
    changed = trial.splits[0].whole.changed if trial.splits else ()
    facts: dict[str, Any] = {"failed": trial.failed}
    if not whole_batches:
        facts |= {"statistics": _name_statistics(trial, stage), "changed": changed}
    verdict = replace(_judge(trial, count, preferred), **facts)
    if verdict.is_unsure:
        precise = try_split(stage, iter([trial.sample]), "float64")
        if precise.precise and not precise.why_not and _is_the_same_step(trial, precise):
            trial, verdict = precise, replace(_judge(precise, count, preferred), **facts)
    if not callable(count):
        verdict = _judge_altered(verdict, trial, stage)
    verdict = _worst(from_all_ranks([verdict]) if together else [verdict])
    split = _conclude(verdict, trial, count, check)
    if split is None or trial.whole is None:
        return split
    leaves = tuple(map(weakref.ref, trial.splits[0].parameters)) if trial.splits else ()
    per_sample, log_rules = _count_per_sample(split, trial), _find_log_rules(split, trial)
    return replace(split, leaves=leaves, per_sample=per_sample, log_rules=log_rules)


def _is_the_same_step(trial: Trial, precise: Trial) -> bool:
    """Whether float64 changed rounding alone: kernels of quantised layers, for instance, do not know it."""
    one, other = trial.splits[0].whole.everything, precise.splits[0].whole.everything
    return one.shape == other.shape and float((one - other).norm()) <= 0.1 * float(one.norm())


def _name_statistics(trial: Trial, stage: Stage) -> str:
    if not trial.statistics:
        return ""
    names = []
    for model in stage.models:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.training:
                names.append(repr(name))
    return list_some(names)


@dataclass(frozen=True)
class _Verdict:
    """What one rank found.

    Attributes:
        split: the best that was found; None if nothing could be.
        rules: the counting rules that give what was read, or that split the loss; the likeliest first.
        why_not: why the loss cannot be split that way; empty if it can.
        error: how far the best is off.
        limit: the largest error that is taken for rounding.
        checked: whether gradients or losses were compared.
        skipped: whether the step returned None.
        statistics: the layers that take statistics of the batch; empty if none does.
        changed: the buffers that the step changes.
        failed: whether the step cannot run on a few samples.
    """

    split: LossSplit | None = None
    rules: tuple[CountTargets, ...] = ()
    why_not: str = ""
    error: float = float("inf")
    limit: float = _SURE
    checked: bool = True
    skipped: bool = False
    statistics: str = ""
    changed: tuple[str, ...] = ()
    failed: bool = False

    @property
    def is_unsure(self) -> bool:
        """Whether float64 may tell rounding from a real difference."""
        ambiguous = _SURE < self.error <= (0.3 if self.limit == _ROUNDED else 1e-2)
        return self.checked and not self.skipped and ambiguous and self.limit not in (_FLOAT64, _ALL_FLOAT64)


def _judge(trial: Trial, count: Count, preferred: CountRule | None) -> _Verdict:
    if trial.is_skipped:
        return _Verdict(skipped=True, checked=False)
    if callable(count):
        if trial.why_not:
            return _Verdict(LossSplit(None, count), (count,), trial.why_not, checked=False)
        return _Verdict(LossSplit(None, count), (count,), "", _error_of_rule(count, trial), error_limit(trial))
    if not trial.splits:
        alone = None if trial.whole is None else _classify_alone(trial.whole)
        split = None if alone is None else LossSplit(alone, None)
        return _Verdict(split, why_not=trial.why_not, checked=False)
    read = _classify(trial.splits)
    if isinstance(read, str):
        return _judge_by_rules(trial, read, preferred)
    if trial.why_not:
        likely = _classify_alone(trial.splits[0].whole) if read[0].term is None else read[0]
        split = LossSplit(likely or read[0], None, provisional=trial.shows_nothing)
        return _Verdict(split, why_not=trial.why_not, checked=False)
    errors = [max(_error_of_read(one, split, trial) for split in trial.splits) for one in read]
    best = min(range(len(read)), key=lambda place: (errors[place] > 3 * min(errors) + _TIED, place))
    rules = _rules_that_give(read[best], trial, preferred)
    return _Verdict(LossSplit(read[best], None), tuple(rules), "", errors[best], error_limit(trial))


def _judge_altered(verdict: _Verdict, trial: Trial, stage: Stage) -> _Verdict:
    """Whether what holds for the samples holds for them with other weights and masks, too."""
    is_right = verdict.checked and not verdict.why_not and verdict.error <= verdict.limit
    if not is_right or not stage.gradients or verdict.split is None or verdict.split.read is None:
        return verdict
    for sample in list_altered(trial.sample):
        altered = try_split(stage, iter([sample]), trial.precision)
        if altered.why_not or altered.precision != trial.precision:
            continue  # a step need not run on any numbers
        other = _judge(altered, "auto", None)
        if other.split is None or other.split.read is None or other.error > other.limit:
            why = other.why_not or "samples of a batch depend on one another where their weights or masks differ"
            return replace(verdict, split=LossSplit(None, None), why_not=why, error=float("inf"), rules=())
    return verdict


def _judge_by_rules(trial: Trial, why_not: str, preferred: CountRule | None) -> _Verdict:
    """A loss that does not show its normalizers: the rules that split it, by gradients alone."""
    if trial.why_not:
        return _Verdict(why_not=trial.why_not, checked=False)
    candidates = _candidates(trial, preferred)
    errors = [_error_of_rule(rule, trial) for rule in candidates]
    nearest = max(3 * min(errors), _TIED)
    rules = [rule for rule, error in zip(candidates, errors, strict=True) if error <= nearest]
    return _Verdict(LossSplit(None, rules[0]), tuple(rules), why_not, min(errors), error_limit(trial))


def _worst(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Of all ranks that could compare anything, with the rules that hold on all of them."""
    checked = [verdict for verdict in verdicts if verdict.checked] or [v for v in verdicts if v.split is not None]
    if not checked:
        return next((verdict for verdict in verdicts if not verdict.skipped), verdicts[0])
    worst = max(checked, key=lambda verdict: (bool(verdict.why_not), verdict.error / verdict.limit))
    rules = tuple(rule for rule in worst.rules if all(rule in verdict.rules for verdict in checked))
    return replace(worst, rules=rules)


def _conclude(verdict: _Verdict, trial: Trial, count: Count, check: bool) -> LossSplit | None:
    if verdict.skipped:
        return None
    if verdict.statistics and check:
        why = f"BatchNorm in training mode takes the statistics of the samples that run together ({verdict.statistics})"
        raise CannotSplitError(why, trial)
    if verdict.failed and check and not callable(count):
        raise CannotSplitError(trial.why_not)
    if not verdict.checked:
        return _choose_unchecked(verdict, trial, count)
    assert verdict.split is not None
    right = verdict.error <= verdict.limit
    if verdict.split.read is None and not callable(count):
        otherwise = replace(verdict.split, count=verdict.rules[0]) if right and verdict.rules else None
        if otherwise is not None and _is_the_only_way(trial):
            _say_found(otherwise, verdict.error, trial, verdict.rules[1:])
            return otherwise
        if check or otherwise is not None or verdict.split.count is None:
            raise CannotSplitError(verdict.why_not, trial, otherwise, _nearest(trial, verdict))
        warn(_unchecked(verdict))
        return verdict.split
    split = verdict.split
    if split.read is not None and not split.is_sum and verdict.rules:
        split = replace(split, count=verdict.rules[0], scale=_scale(split.read, verdict.rules[0], trial))
    if right and verdict.changed and check and not callable(count):
        why = f"the step changes {list_some(list(map(repr, verdict.changed)))}, and would do so in each micro-batch"
        raise CannotSplitError(why, trial, split)
    if right:
        _say_found(split, verdict.error, trial, ())
        return split
    if check:
        why = f"gradients of pieces miss that of the unsplit samples by {verdict.error:.2g}"
        if callable(count):
            what = f"count= splits no loss like this one: {why}"
            raise CannotSplitError(what, trial, None, _nearest(trial, verdict))
        why = f"{why}, weighted by {split}: samples of a batch depend on one another"
        raise CannotSplitError(why, trial, None, _nearest(trial, verdict))
    warn(_unchecked(verdict))
    return split


def _is_the_only_way(trial: Trial) -> bool:
    """Whether only losses were compared, so that nothing else is known."""
    return not trial.splits[0].parameters


def _unchecked(verdict: _Verdict) -> str:
    return f"micro-batches are weighted by {verdict.split}, which is off by {verdict.error:.1%}: not the same training"


def _nearest(trial: Trial, verdict: _Verdict) -> str:
    if not trial.splits or not trial.splits[0].parameters:
        return ""
    candidates = [rule for rule in (*verdict.rules, *_candidates(trial, None))]
    errors = {
        str(rule) if isinstance(rule, CountRule) else "count=": _error_of_rule(rule, trial) for rule in candidates
    }
    tried = ", ".join(f"{name} ({error:.2g})" for name, error in sorted(errors.items(), key=lambda pair: pair[1])[:3])
    return f" (tried, with the relative error of the gradient: {tried})"


# ---- reading


def _classify(splits: Sequence[Split]) -> list[ReadNormalizer] | str:
    """The ways in which what was read may weight micro-batches; or why nothing does."""
    first = splits[0].whole
    runs = [run for split in splits for run in (split.whole, *split.runs)]
    if not first.terms:
        return "its loss has no autograd graph"
    if any(run.structure != first.structure for run in runs):
        return "the loss is made of other terms for some samples than for others"
    for term in first.terms:
        if term.kind == "nonlinear":
            return f"the loss is not a sum over samples ({term.name} of a mean or sum)"
        if term.kind == "opaque":
            return f"the loss does not show what it is divided by ({term.name})"
    varying = tuple(_find_varying(place, runs) for place in range(len(first.terms)))
    normalized = [place for place, places in enumerate(varying) if places and not _cancels(place, places, runs)]
    offsets: dict[int, float] = {}
    for place in normalized:
        offset = _find_offset(place, varying[place], splits)
        if offset is None:
            return f"what {first.terms[place].name} is divided by does not add up over samples"
        offsets[place] = offset
    found: list[ReadNormalizer] = []
    if normalized:
        shares = [_shares(place, varying[place], offsets[place], splits) for place in normalized]
        if not all(torch.allclose(shares[0], share, rtol=1e-5, atol=1e-8) for share in shares):
            return "the loss has several normalizers"
        term, *others = normalized
        name = _describe(first, term)
        summed = _find_summed(term, varying[term], offsets[term], runs)
        found.append(ReadNormalizer(first.structure, term, tuple(others), varying, offsets[term], summed, name))
    if len(normalized) < len(first.terms):
        found.append(ReadNormalizer(first.structure, None, (), varying, 0.0, None, _NOTHING))
    return found


def _classify_alone(run: Run) -> ReadNormalizer | None:
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
        summed, divisor = run.terms[place].summed, _read_count(run, place, varying) - offset
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
    counts = [_read_count(run, place, varying) for run in runs]
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


def _read_count(run: Run, place: int, varying: Sequence[int]) -> float:
    slots = [Slot(value, divides) for value, divides in run.terms[place].slots]
    return float(count_of(slots, varying))


def _find_offset(place: int, varying: Sequence[int], splits: Sequence[Split]) -> float | None:
    """What is added to a count, such as an epsilon; None if it is no count, since it does not add up."""
    offsets = []
    for split in splits:
        whole = _read_count(split.whole, place, varying)
        counts = [_read_count(run, place, varying) for run in split.runs]
        missed = sum(counts) - whole
        if abs(missed) <= 1e-12 * abs(whole):
            missed = 0.0
        # A count that is kept from zero, as by clamp(min=1), is too large by what it is kept at.
        if missed and min(counts) == missed and missed <= 1 and not split.runs[counts.index(missed)].gradient.any():
            missed = 0.0
        if not abs(missed) <= 1e-3 * abs(whole):
            return None
        offsets.append(missed / (len(counts) - 1))
    if all(abs(offset - offsets[0]) <= 1e-3 * abs(offsets[0]) for offset in offsets):
        return offsets[0]
    return 0.0 if max(map(abs, offsets)) <= 1e-6 * abs(_read_count(splits[0].whole, place, varying)) else None


def _shares(place: int, varying: Sequence[int], offset: float, splits: Sequence[Split]) -> torch.Tensor:
    shares = []
    for split in splits:
        counts = [_read_count(run, place, varying) - offset for run in split.runs]
        shares += [count / sum(counts) if sum(counts) else 0.0 for count in counts]
    return torch.tensor(shares, dtype=torch.float64)


def _describe(run: Run, place: int) -> str:
    term = run.terms[place]
    if term.name in ("NllLoss", "NllLoss2D"):
        return "its targets, or their class weights, as cross_entropy sums them"
    if term.kind == "mean":
        return f"the number of elements of its {term.name.lower()}"
    return "the number that its sum is divided by"


def _error_of_read(read: ReadNormalizer, split: Split, trial: Trial) -> float:
    if read.term is None:
        return split.error([1.0] * len(split.runs), gradient_floor(trial))
    places = read.varying[read.term]
    counts = [_read_count(run, read.term, places) - read.offset for run in split.runs]
    counts = [
        0.0 if not run.gradient.any() and count <= 1 else count for run, count in zip(split.runs, counts, strict=True)
    ]
    total = sum(counts)
    return split.error([count / total if total else 0.0 for count in counts], gradient_floor(trial))


def gradient_floor(trial: Trial) -> float:
    """Gradients that are smaller than this share of the average one are mostly rounding."""
    if trial.precise:
        return 1e-4
    return 0.3 if trial.rounding else 1e-2


def error_limit(trial: Trial) -> float:
    """The largest error that is taken for rounding."""
    if not trial.splits[0].parameters:  # two weights can always explain one loss
        return _ROUNDED
    if trial.precise:
        return _FLOAT64
    if all(parameter.dtype is torch.float64 for parameter in trial.splits[0].parameters):
        return _ALL_FLOAT64
    return _ROUNDED if trial.rounding else _FLOAT32


# ---- counting rules


def _candidates(trial: Trial, preferred: CountRule | None) -> list[CountRule]:
    """Counting rules, the likeliest first."""
    ignored = sorted(_may_be_ignored(trial) - {-100})
    read = [term.ignored for term in trial.whole.terms if term.ignored is not None] if trial.whole is not None else []
    first = [CountRule(name, index) for index in read for name in ("targets", "next_tokens")]
    usual = [*first, CountRule("targets"), CountRule("next_tokens"), CountRule("samples"), CountRule("sum")]
    others = [CountRule(name, index) for index in ignored for name in ("targets", "next_tokens")]
    return list(dict.fromkeys([*([preferred] if preferred is not None else []), *usual, *others]))


def _may_be_ignored(trial: Trial) -> set[int]:
    """Labels of the samples that were tried: the least, the greatest, the most frequent, and what others use."""
    found: set[int] = set()
    for piece in trial.splits[0].pieces if trial.splits else ():
        labels = find_labels(piece)[1]
        if labels is not None and labels.numel() > 0:
            values, frequencies = labels.cpu().unique(return_counts=True)
            found |= {int(values[0]), int(values[-1]), int(values[frequencies.argmax()])}
            # 0 is padding in text, 255 no class in segmentation; -1 is used in both.
            found |= {value for value in (0, -1, 255) if bool((values == value).any())}
    return found


def _rules_that_give(read: ReadNormalizer, trial: Trial, preferred: CountRule | None) -> list[CountRule]:
    """The counting rules in proportion to what was read, in every piece and sample."""
    if read.term is None:
        return []
    scales = {rule: _scale_or_none(read, rule, trial) for rule in _candidates(trial, preferred)}
    fitting = [rule for rule, scale in scales.items() if scale is not None]
    return sorted(fitting, key=lambda rule: abs(scales[rule] - 1) > _SURE)  # pyright: ignore[reportOptionalOperand]


def _find_log_rules(split: LossSplit, trial: Trial) -> dict[str, LogRule | None]:
    def as_logged(batch: Any, run: Run) -> LoggedRun:
        count: float | None = None
        if split.read is not None and split.read.term is not None:
            count = _read_count(run, split.read.term, split.read.varying[split.read.term])
        elif callable(split.count) and not is_sum(split.count):
            count = float(split.count(batch))
        return LoggedRun(batch, run.loss, count, run.logged)

    splits: list[tuple[LoggedRun, list[LoggedRun]]] = []
    for one in trial.splits:
        pieces = [as_logged(piece, run) for piece, run in zip(one.pieces, one.runs, strict=True)]
        splits.append((as_logged(trial.sample.whole, one.whole), pieces))
    return find_log_rules(splits, [rule for rule in _candidates(trial, None) if not is_sum(rule)])


def _count_per_sample(split: LossSplit, trial: Trial) -> float:
    read = split.read
    if read is None or read.term is None:
        return 1.0
    assert trial.whole is not None
    count = _read_count(trial.whole, read.term, read.varying[read.term])
    return count / trial.sample.size if count > 0 else 1.0


def _scale(read: ReadNormalizer, rule: CountTargets, trial: Trial) -> float:
    scale = _scale_or_none(read, rule, trial)
    return 1.0 if scale is None else scale


def _scale_or_none(read: ReadNormalizer, rule: CountTargets, trial: Trial) -> float | None:
    assert read.term is not None
    if is_sum(rule):
        return None
    scale: float | None = None
    for split in trial.splits:
        for piece, run in zip(split.pieces, split.runs, strict=True):
            try:
                counted = float(rule(piece))
            except ValueError:
                return None  # it does not apply to such batches
            count = _read_count(run, read.term, read.varying[read.term]) - read.offset
            if counted == 0 and (count == 0 or not run.gradient.any()):
                continue
            if counted == 0 or not torch.isclose(torch.tensor(count / counted), torch.tensor(scale or count / counted)):
                return None
            scale = scale or count / counted
    return scale


def _error_of_rule(rule: CountTargets, trial: Trial) -> float:
    errors = []
    for split in trial.splits:
        try:
            counts, total = weights_of(rule, split.pieces)
        except ValueError:
            if isinstance(rule, CountRule):
                return float("inf")  # it does not apply to such batches
            raise
        # Where the total is 0 each count is 0, and so is each weight.
        weights = [float(count) / max(float(total), 1e-30) for count in counts]
        errors.append(split.error(weights, gradient_floor(trial)))
    return max(errors)


def from_all_ranks(mine: list[Any]) -> list[Any]:
    """The entries of all ranks' lists, so that all decide alike."""
    if rank_count() == 1:
        return mine
    gathered: list[Any] = [None] * rank_count()
    dist.all_gather_object(gathered, mine)
    return [entry for some in gathered for entry in some]


def _choose_unchecked(verdict: _Verdict, trial: Trial, count: Count) -> LossSplit:
    """No rank could compare gradients: what was read, else what fits most models."""
    split = verdict.split
    if callable(count):
        warn(f"micro-batches are weighted as count= says; nothing was checked, as {trial.why_not}")
        return LossSplit(None, count)
    if split is not None and split.read is not None:
        say("micro-batches are weighted by %s; gradients were not compared, as %s", split, trial.why_not)
        return split
    first = CountRule("targets" if find_labels(trial.sample.whole)[1] is not None else "samples")
    warn(
        f"micro-batches are weighted by {first}; nothing was checked, as {trial.why_not}. "
        "Give count= if the loss averages over something else."
    )
    return LossSplit(None, first)


def _say_found(split: LossSplit, error: float, trial: Trial, tied: Sequence[CountTargets]) -> None:
    what = "gradient" if trial.splits and trial.splits[0].parameters else "loss"
    alike = f" (these samples do not tell it from {tied[0]})" if tied else ""
    say(
        "MicroBatching: each micro-batch is weighted by %s%s. Checked on %d samples: the %s matches the unsplit batch to "
        "%.0e",
        split,
        alike,
        trial.sample.size,
        what,
        error,
    )
