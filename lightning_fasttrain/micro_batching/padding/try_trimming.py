"""Try on a few rows of the user's own batch whether padding can be cut off without changing the training."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.core.batch.host_copies import host_values, keep_on_host
from lightning_fasttrain.core.batch.leaves import list_tensors, pick_rows, walk_leaves
from lightning_fasttrain.core.batch.padded_axes import (
    Ends,
    Extents,
    PaddedAxis,
    Padding,
    Proposal,
    count_tokens,
    likeliest_padding,
)
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit, match_log_rules
from lightning_fasttrain.trial.deterministic_step import Rows, TrimmedRows
from lightning_fasttrain.trial.runs import Trial
from lightning_fasttrain.trial.sample_rows import Sample
from lightning_fasttrain.trial.try_split import (
    TrialStep,
    distinguish_rounding,
    run_again,
    try_split,
    watching_calls,
)

_PROPOSALS = 3  # proposals that are tried for one axis, if the likeliest of all axes do not hold together
_SURE = 1e-5
_LOGGED = 1e-3  # products of other shapes round differently, and a logged value may be a small difference


@dataclass(frozen=True)
class Outcome:
    """Result of trying to run without padding on one rank.

    Attributes:
        why_not: why it changes the training, as a clause; empty if it does not.
        is_known: whether the samples could show anything: False where a step had no gradient or ran out of memory.
        error: relative difference of the gradients.
    """

    why_not: str = ""
    is_known: bool = True
    error: float = 0.0

    def of_all_ranks(self) -> "Outcome":
        """Return the worst outcome of all ranks, which call this together."""
        outcomes = from_all_ranks([self])
        known = [outcome for outcome in outcomes if outcome.is_known] or outcomes
        return max(known, key=lambda outcome: (bool(outcome.why_not), outcome.error))


def find_trimming(
    trial_step: TrialStep,
    batch: object,
    split: LossSplit,
    candidates: list[Padding],
    most_rows: int,
    multiples: tuple[int, int],
) -> tuple[Padding | None, Outcome]:
    """Return the padding that can be cut off with the same gradient, and what was seen of the last one tried.

    All ranks call this together and get the same result.

    Args:
        trial_step: the step, and the environment it runs in.
        batch: the batch from which a few rows are taken.
        split: how the loss is split.
        candidates: what is tried: all axes together, then one axis at a time.
        most_rows: number of rows that is known to fit in memory.
        multiples: lengths that the step certainly needs multiples of, and that it may need multiples of.
    """
    candidates = _agree(candidates)
    if not candidates:
        return None, Outcome(is_known=False)
    together, *alone = candidates
    outcome = _try_together(trial_step, batch, split, together, most_rows, multiples)
    if not outcome.why_not:
        return together, outcome
    if not outcome.is_known:
        return None, outcome
    accepted: list[PaddedAxis] = []
    found = outcome
    for candidate in alone:
        if any(axis.members == candidate.axes[0].members for axis in accepted):
            continue
        other = _try_together(trial_step, batch, split, candidate, most_rows, multiples)
        if not other.why_not:
            accepted += candidate.axes
            found = other
    if not accepted:
        return None, found
    return Padding(tuple(accepted)), found


def list_candidates(proposals: Sequence[list[Proposal]]) -> list[Padding]:
    """Return what is tried: all axes together, then further proposals for one axis at a time.

    Args:
        proposals: for each axis what may show its padding, the likeliest first.
    """
    if not proposals:
        return []
    candidates = [likeliest_padding(list(proposals))]
    for axis in proposals:
        for one in axis[:_PROPOSALS]:
            alone = Padding((one.axis,))
            if alone != candidates[0]:
                candidates.append(alone)
    return candidates


def _agree(candidates: list[Padding]) -> list[Padding]:
    """Return the candidates of the first rank that has some."""
    if not all(isinstance(axis.source, str) for candidate in candidates for axis in candidate.axes):
        # A function of the user's may not be picklable, and all ranks have it.
        answers = from_all_ranks([None])
        return candidates if answers.count(None) == len(answers) else []
    answers = from_all_ranks([candidates])
    if None in answers:
        return []
    return next(filter(None, answers), [])


def _try_together(
    trial_step: TrialStep, batch: object, split: LossSplit, padding: Padding, most_rows: int, multiples: tuple[int, int]
) -> Outcome:
    """Try on this rank's samples, and return the worst outcome of all ranks."""
    # Where forwards communicate, all ranks must run them, or none.
    if not all(from_all_ranks([padding.read(batch) is not None])):
        return Outcome(f"a batch has no {padding}", is_known=False)
    return _try(trial_step, batch, split, padding, most_rows, multiples).of_all_ranks()


def _try(
    trial_step: TrialStep, batch: object, split: LossSplit, padding: Padding, most_rows: int, multiples: tuple[int, int]
) -> Outcome:
    needed, rounded = multiples
    extents = padding.read(batch)
    assert extents is not None
    tried = _Rows(replace(trial_step, in_turn=False), batch, split, extents, most_rows)
    outcome, has_failed = tried.try_multiple(needed)
    # Models that need a multiple of some length are tried with that, all others with the exact lengths.
    if has_failed and trial_step.gradients and rounded > needed:
        outcome, _ = tried.try_multiple(rounded)
    return outcome


@dataclass(frozen=True)
class _Rows:
    """Rows of a batch, which are tried with and without their padding.

    Args:
        trial_step: where the step runs.
        batch: the batch.
        split: how the loss is split.
        extents: where the rows begin and end.
        most_rows: number of rows that is known to fit in memory.
    """

    trial_step: TrialStep
    batch: object
    split: LossSplit
    extents: Extents
    most_rows: int

    def try_multiple(self, multiple: int) -> tuple[Outcome, bool]:
        """Try rows that are cut to a multiple of some length; also return whether the step failed on them."""
        outcome = Outcome("no row is short enough", is_known=False)
        for rows in self._choose(multiple):
            if self.trial_step.gradients and all(self.extents.is_whole([row], multiple) for row in rows):
                continue  # nothing would be cut off
            trial = try_split(self.trial_step, iter([_cut_sample(self.batch, self.extents, rows, multiple)]))
            outcome = _compare(self.trial_step, trial, self.split)
            if outcome.error > _SURE and outcome.why_not:
                outcome = _explain_labels(outcome, self.batch, self.extents, rows)
                outcome = _name_module(outcome, self.trial_step, self.batch, self.extents, rows[0], multiple)
            if outcome.why_not:
                return outcome, trial.failed
        return outcome, False

    def _choose(self, multiple: int) -> list[list[int]]:
        """Return groups of rows, each with a long one: on each side of each axis that of which the most is cut off.

        With rounded lengths also that which ends next to the cut: padding may act on what is near. Rows without a
        counted target have no gradient, so they would not show anything.
        """
        extents = self.extents
        filled = [row for row, ends in enumerate(extents.rows) if count_tokens(ends)] or [0]
        filled = [row for row in filled if row in _list_counted(self.batch, extents)] or filled
        chosen: list[int] = []
        for axis in range(len(extents.sizes)):
            chosen.append(max(filled, key=lambda row, axis=axis: extents.rows[row][axis][0]))
            chosen.append(min(filled, key=lambda row, axis=axis: extents.rows[row][axis][1]))
        longest = max(filled, key=lambda row: count_tokens(extents.rows[row]))
        if not self.trial_step.gradients:  # ranks with sharded parameters must choose equally many rows
            return [[*chosen, longest]]
        cut = [row for row in filled if not extents.is_whole([row], multiple)]
        if cut and multiple > 1:
            chosen.append(min(cut, key=lambda row: self._count_padding_left(row, multiple)))
        chosen = [row for row in dict.fromkeys(chosen) if row in cut] or [longest]
        each = max(1, self.most_rows - 1)
        return [[*chosen[start : start + each], longest] for start in range(0, len(chosen), each)]

    def _count_padding_left(self, row: int, multiple: int) -> int:
        return count_tokens(self.extents.spans_of([row], multiple)) - count_tokens(self.extents.rows[row])


def _list_counted(batch: object, extents: Extents) -> set[int]:
    """Return the rows that have a target, as far as labels of the batch show it; else all."""
    _, labels = find_labels(batch)
    if labels is None or labels.ndim < 2 or len(labels) != len(extents.rows):
        return set(range(len(extents.rows)))
    return set((labels != -100).flatten(1).any(1).nonzero()[:, 0].tolist())


def _cut_sample(batch: object, extents: Extents, rows: list[int], multiple: int) -> Sample:
    """Return rows with their padding, and each of them without it."""
    trimmed = trim_batch(batch, extents, [[row] for row in rows], multiple)
    cutting: list[tuple[Any, Rows | None]] = []
    for place, (part, spans) in enumerate(zip(trimmed.parts, trimmed.spans, strict=True)):
        cut = [(size, start, stop) for size, (start, stop) in zip(extents.sizes, spans, strict=True)]
        cutting.append((part, TrimmedRows(place, place + 1, tuple(cut))))
    return Sample(pick_rows(batch, rows), len(rows), [cutting])


def _compare(trial_step: TrialStep, trial: Trial, split: LossSplit) -> Outcome:
    if trial.why_not:
        is_known = trial.failed or not (trial.is_skipped or trial.shows_nothing)
        return Outcome(trial.why_not, is_known)
    for run, (_, rows) in zip(trial.splits[0], trial.sample.cuttings[0], strict=True):
        # Whatever is cut off a row without a gradient, nothing would differ. A mean over no target is NaN.
        if trial_step.gradients and _is_cut(rows) and not run.values[1:].nan_to_num(0.0).any():
            return Outcome("a row that is cut has no gradient", is_known=False)
    trial = distinguish_rounding(trial_step, trial, lambda trial: _error_of(split, trial))
    error = _error_of(split, trial)
    if error > trial.limit:
        why = f"the gradient then differs by {error:.1g}" if error < float("inf") else "the loss then has other terms"
        return Outcome(f"{why}: padded entries take part in it, or the places of the others count", error=error)
    for name, rules in split.log_rules.items():
        if rules and not match_log_rules(split, name, rules, [trial], _LOGGED):
            return Outcome(f"the logged value {name!r} depends on padding", error=error)
    return Outcome(error=error)


def _is_cut(rows: Rows | None) -> bool:
    return isinstance(rows, TrimmedRows) and any(stop - start < size for size, start, stop in rows.spans)


def _error_of(split: LossSplit, trial: Trial) -> float:
    """Return the largest relative error of the gradient if micro-batches are trimmed."""
    if split.read is not None and any(run.structure != split.read.structure for run in trial.runs):
        return float("inf")
    return trial.error(split.list_weights)


def _name_module(
    outcome: Outcome, trial_step: TrialStep, batch: object, extents: Extents, row: int, multiple: int
) -> Outcome:
    """Name the first module whose output for the same entries of a row depends on the padding beside them."""
    if not trial_step.gradients:
        return outcome  # ranks with sharded parameters must run the same number of forwards
    trimmed = trim_batch(batch, extents, [[row]], multiple)
    try:
        whole = _list_outputs(trial_step, pick_rows(batch, [row]))
        short = _list_outputs(trial_step, trimmed.parts[0])
    except Exception:
        return outcome  # the step may need several rows, or lengths of some multiple: then no module is named
    is_padded_left = trimmed.spans[0][0][0] > 0
    for (name, one), (other_name, other) in zip(whole, short, strict=False):
        if name != other_name or one.ndim != other.ndim:
            break
        for place, length in enumerate(other.shape):
            beyond = one.shape[place] - length
            if beyond > 0:  # convolutions may have shortened both
                one = one.narrow(place, beyond if is_padded_left else 0, length)
        if one.shape == other.shape and not torch.allclose(one, other, rtol=1e-3, atol=1e-5):
            return replace(outcome, why_not=f"{outcome.why_not}; {name!r} is the first module that differs")
    return outcome


def _list_outputs(trial_step: TrialStep, rows: object) -> list[tuple[str, Tensor]]:
    """Return the outputs of all innermost modules in a run of the step, in their order."""
    outputs: list[tuple[str, Tensor]] = []
    names: dict[nn.Module, str] = {}
    for model in trial_step.models:
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                names.setdefault(module, name)

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            outputs.append((names[module], output.detach().float()))

    with watching_calls(names, note):
        run_again(trial_step, Trial(Sample(rows, 1, []), precision="float32"))
    return outputs


def _explain_labels(outcome: Outcome, batch: object, extents: Extents, rows: Sequence[int]) -> Outcome:
    """Name a sample whose labels count entries that are padding, where there is one."""
    path, labels = find_labels(batch)
    for place_of_axis, padded in enumerate(extents.padding.axes):
        places = dict(padded.members).get(path)
        if labels is None or places is None or padded.source == path:
            continue
        for row in rows:
            counted = (labels[row] != -100).nonzero()[:, places[0] - 1].tolist()
            start, stop = extents.rows[row][place_of_axis]
            for place in counted:
                if not start <= place < stop:
                    why = f"{path} counts entry {place} of sample {row}, which is padding by {padded}"
                    return Outcome(f"{outcome.why_not} ({why})", error=outcome.error)
    return outcome


@dataclass(frozen=True)
class TrimmedParts:
    """Micro-batches of rows of similar length, without the padding that none of their rows needs.

    Attributes:
        parts: the micro-batches, the one with the longest rows first.
        rows: rows of the batch that each of them holds.
        spans: the part of each sequence axis that each of them holds.
        extents: where the rows of the batch begin and end.
    """

    parts: list[Any]
    rows: list[list[int]]
    spans: list[Ends]
    extents: Extents

    @property
    def order(self) -> list[int]:
        """The rows of the batch in the order of the micro-batches."""
        return list(itertools.chain.from_iterable(self.rows))

    @property
    def tokens(self) -> int:
        """The number of entries that the micro-batches have, in tokens."""
        return sum(map(self.tokens_of, range(len(self.parts))))

    def tokens_of(self, part: int) -> int:
        """Return the number of entries of one micro-batch, in tokens."""
        return len(self.rows[part]) * count_tokens(self.spans[part])

    def rows_of(self, part: int) -> list[int]:
        """Return the rows of the batch that a micro-batch holds."""
        return self.rows[part]

    def join(self, values: Sequence[Tensor], held: Sequence[int]) -> Tensor:
        """Join a tensor that each micro-batch returned, in the batch's own order of rows.

        Sequence axes get their full length back: what was cut off is zero.

        Args:
            values: a tensor of each micro-batch, with at least one axis.
            held: the micro-batches that they are from.
        """
        values = self._fill_up(values, held)
        if any(value.shape[1:] != values[0].shape[1:] for value in values):
            why = "they differ in an axis that is not one of the trimmed ones"
            raise ValueError(f"the tensors that micro-batches returned cannot be joined: {why}")
        joined = torch.cat(list(values))
        sizes = list(map(len, map(self.rows_of, held)))
        if len(held) < len(self.parts) or list(map(len, values)) != sizes:
            return joined  # not one entry per row
        return joined[_list_on(joined.device, self.order).argsort()]

    def _fill_up(self, values: Sequence[Tensor], held: Sequence[int]) -> list[Tensor]:
        filled = list(values)
        for axis, size in enumerate(self.extents.sizes):
            spans = [self.spans[part][axis] for part in held]
            for place in range(1, min(map(Tensor.dim, values))):
                if all(value.shape[place] == stop - start for value, (start, stop) in zip(values, spans, strict=True)):
                    ends = zip(filled, spans, strict=True)
                    filled = [_fill(value, place, start, size) for value, (start, _) in ends]
                    break
        return filled


def _fill(value: Tensor, place: int, start: int, size: int) -> Tensor:
    shape = [*value.shape]
    shape[place] = size
    filled = value.new_zeros(shape)
    filled.narrow(place, start, value.shape[place]).copy_(value)
    return filled


@contextmanager
def attention_for_any_length() -> Iterator[None]:
    """Leave cuDNN out of torch's choice for attention, as it builds a plan for each new shape.

    That takes 150 ms on an H200, where a forward and backward of a known shape take 0.6 ms, and cut micro-batches have
    many lengths. Flash and efficient attention need no plan. A user's own choice of cuDNN alone stays.
    """
    kernels = torch.backends.cuda
    others = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled()
    if not (others and kernels.cudnn_sdp_enabled()):
        yield
        return
    kernels.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(True)


def trim_batch(batch: object, extents: Extents, rows: Sequence[Sequence[int]], multiple_of: int) -> TrimmedParts:
    """Return one micro-batch for each group of rows, cut to what these rows need.

    Example:
        >>> from lightning_fasttrain.core.batch.padded_axes import PaddedAxis, Padding
        >>> ids = torch.tensor([[1, 0, 0, 0], [2, 3, 4, 0], [5, 6, 0, 0]])
        >>> extents = Padding((PaddedAxis((("batch", (1,)),), "batch", 0),)).read(ids)
        >>> trim_batch(ids, extents, [[1], [2, 0]], multiple_of=1).parts
        [tensor([[2, 3, 4]]), tensor([[5, 6],
                [1, 0]])]
    """
    spans = [extents.spans_of(group, multiple_of) for group in rows]
    device = next((leaf.device for leaf in list_tensors(batch).values()), torch.device("cpu"))
    # One copy to a device for all groups.
    order = _list_on(device, itertools.chain.from_iterable(rows))
    parts: list[Any] = []
    for group, places, span in zip(rows, order.split(list(map(len, rows))), spans, strict=True):
        parts.append(_take(batch, extents, list(group), places, span))
    return TrimmedParts(parts, list(map(list, rows)), spans, extents)


def _take(batch: object, extents: Extents, rows: list[int], places: Tensor, spans: Ends) -> Any:
    cuts: dict[str, list[tuple[int, list[int]]]] = {}
    for axis, span in zip(extents.padding.axes, spans, strict=True):
        for path, along in axis.members:
            for one in along:
                cuts.setdefault(path, []).append((one, span))

    def take(leaf: object, path: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.narrow(axis, start, stop - start)
            return _take_rows(leaf, rows, places)
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.take(range(start, stop), axis)
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == len(extents.rows):
            return type(leaf)(map(leaf.__getitem__, rows))
        return leaf

    return walk_leaves(batch, take, "batch")


def _take_rows(leaf: Tensor, rows: list[int], places: Tensor) -> Tensor:
    taken = leaf.index_select(0, places.to(leaf.device))
    if not leaf.is_cpu and (known := host_values(leaf)) is not None:
        keep_on_host(taken, known[rows])
    return taken


def _list_on(device: torch.device, numbers: Iterable[int]) -> Tensor:
    """Return integers as a tensor on a device, without waiting for it."""
    made = torch.tensor(list(numbers), dtype=torch.int64, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
