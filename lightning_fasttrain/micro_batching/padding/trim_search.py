"""Decide during a run whether padding is cut off, and cut the batches."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import (
    batch_size,
    can_be_cut,
    list_tensors,
    split_batch,
    take_rows,
    walk_leaves,
)
from lightning_fasttrain.core.batch.padded_axes import Extents, Lengths, Padding, propose_padding
from lightning_fasttrain.core.batch.padding_share import group_rows, group_rows_evenly, split_groups
from lightning_fasttrain.core.checks import NotACallback, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.core.modules.blocks import length_divisor
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit
from lightning_fasttrain.micro_batching.padding.try_trimming import (
    Outcome,
    TrimmedParts,
    attention_for_any_length,
    find_trimming,
    list_candidates,
    trim_batch,
)
from lightning_fasttrain.trial.try_split import TrialSchedule, TrialStep

_LEAST = 0.05  # a smaller share of padding is not worth a trial
_WAY_OUT = "Leave trim_padding out, which cuts padding off only where the gradient stays the same"
LOOKED_FOR = (
    "masks of zeros and ones, lengths of rows, integers that end or begin with one value, and labels of -100 were "
    "looked for"
)


@check_arguments
@dataclass(frozen=True)
class TrimPadding(NotACallback):
    """Settings for finding padding and cutting it off.

    Attributes:
        lengths: the tensor that shows the padding, by its name in the batch (a mask, lengths, token ids or labels), or
            a function that maps a batch to the lengths of its rows, for padding on the right. By default it is found.
        multiple_of: lengths are rounded up to a multiple of this, so that compiled code sees few shapes.

    Raises:
        TypeError: ``lengths`` is neither a name nor a function.
        ValueError: ``multiple_of`` is less than 1.

    Example:
        >>> TrimPadding(lengths="attention_mask")
        TrimPadding(lengths='attention_mask', multiple_of=8)
    """

    where_to_use: ClassVar[str] = "It is a setting: use MicroBatching(n, trim_padding=TrimPadding())"

    lengths: str | Lengths | None = None
    multiple_of: PositiveInt = 8


@dataclass(frozen=True)
class WholeParts:
    """Micro-batches of neighbouring rows, with their padding."""

    parts: list[Any]

    def rows_of(self, part: int) -> list[int]:
        """Return the rows of the batch that a micro-batch holds."""
        start = sum(map(batch_size, self.parts[:part]))
        return list(range(start, start + batch_size(self.parts[part])))

    def join(self, values: Sequence[Tensor], held: Sequence[int]) -> Tensor:
        """Join a tensor that each micro-batch returned."""
        return torch.cat(list(values))


Parts = WholeParts | TrimmedParts


class TrimSearch:
    """Finds out whether padding can be cut off in a run, and cuts its batches into micro-batches.

    Args:
        wanted: True refuses a run in which padding cannot be cut off; None cuts it off where that has been shown to be
            exact; False never does.
        max_tokens: largest number of tokens of a micro-batch, instead of a number of micro-batches.

    Attributes:
        padding: the padding that is cut off; None as long as none is known.
        why_not: why none is cut off; empty as long as that is not known.
        padded: number of tokens of the batches so far.
        computed: number of tokens that ran.
        looks: the batches of this run in which padding is looked for.
    """

    def __init__(self, wanted: bool | TrimPadding | None, max_tokens: int | None = None) -> None:
        self.how = TrimPadding()
        if isinstance(wanted, TrimPadding):
            self.how, wanted = wanted, True
        self.multiple_of = self.how.multiple_of  # of lengths; also of the ranks that share the tokens of a sequence
        self.wanted = wanted
        self.max_tokens = max_tokens
        self.padding: Padding | None = None
        self.why_not = ""
        self.padded = self.computed = 0
        self.trial_schedule = TrialSchedule(from_first=True)
        self._has_warned = False

    @property
    def is_open(self) -> bool:
        """Whether a batch may still decide."""
        return self.wanted is not False and not self.why_not

    @property
    def is_asked_for(self) -> bool:
        """Whether it was asked for, so that even a single micro-batch is cut."""
        return self.wanted is True or self.max_tokens is not None

    @property
    def saved(self) -> float:
        """The share of the tokens so far that did not run."""
        return 1 - self.computed / self.padded if self.padded else 0.0

    def attention(self) -> AbstractContextManager[None]:
        """Return the context for running what was cut: where padding is cut off, for micro-batches of any length."""
        return nullcontext() if self.padding is None else attention_for_any_length()

    def begin(self) -> None:
        """Start a run, in whose first batch padding is looked for again: its model may be another one."""
        self.trial_schedule = TrialSchedule(from_first=True)

    def refuse_backbone(self, backbone: object) -> None:
        """Raises: ValueError: padding must be cut off, but the loss sees the whole batch."""
        if self.wanted:
            why = f"{backbone} runs in micro-batches, and the loss sees the whole batch with its padding"
            raise ValueError(explain("trim_padding=True with a loss that cannot be split", why, _WAY_OUT))

    def examine(
        self, make_trial_step: Callable[[], TrialStep], batch: object, split: LossSplit | None, n: int, check: bool
    ) -> None:
        """Find padding in the first batch, and in batches 2, 4, 8, ... while that takes little time.

        Whether it can be cut off is tried on a few of the batch's rows. All ranks call this.

        Args:
            make_trial_step: returns the trial_step on which the step runs.
            batch: the batch.
            split: how its loss is split; None where it is not.
            n: number of micro-batches, each of which fits in memory.
            check: whether trials are wanted where padding need not be cut off.

        Raises:
            ValueError: padding must be cut off and cannot be.
        """
        if not (self.is_open and (check or self.wanted)):
            return
        # All ranks are asked, though one of them may have found another split, or the backbone, by itself.
        is_due = self.trial_schedule.is_due(lambda: split is not None and not split.provisional and can_be_cut(batch))
        if is_due and split is not None:
            with self.trial_schedule.timed():
                self._try(make_trial_step(), batch, split, -(-batch_size(batch) // n))

    def _try(self, trial_step: TrialStep, batch: object, split: LossSplit, most_rows: int) -> None:
        # A batch with other tensors may be padded in another way.
        is_known = self.padding is not None and self.padding.read(batch) is not None
        candidates = [self.padding] if self.padding is not None and is_known else self._list_candidates(batch)
        ranks = length_divisor(trial_step.models)
        self.multiple_of = math.lcm(self.how.multiple_of, ranks)
        multiples = (ranks, self.multiple_of)
        found, outcome = find_trimming(trial_step, batch, split, candidates, most_rows, multiples)
        if found is not None:
            self._say_found(found, outcome, batch, "gradient" if trial_step.gradients else "loss")
            self.padding = found
        elif outcome.is_known:
            self._refuse(outcome.why_not)

    def _list_candidates(self, batch: object) -> list[Padding]:
        if batch_size(batch) == 1:
            return []
        proposals = propose_padding(batch, self.how.lengths, zeros=self.wanted is True)
        return list_candidates([axis for axis in proposals if self.wanted or axis[0].share >= _LEAST])

    def _say_found(self, found: Padding, outcome: Outcome, batch: object, what: str) -> None:
        extents = found.read(batch)
        if found != self.padding and extents is not None:
            text = (
                "MicroBatching: %.0f%% of this batch is padding, which is cut off (read from %s). Checked on a few "
                "samples: the %s matches the untrimmed one to %.0e"
            )
            say(text, 100 * extents.share, found, what, max(outcome.error, 1e-9))

    def _refuse(self, why: str) -> None:
        had, self.padding, self.why_not = self.padding, None, why
        if self.wanted:
            raise ValueError(explain("trim_padding=True cannot cut off the padding of this batch", why, _WAY_OUT))
        if had is not None:
            warn(f"MicroBatching: the padding read from {had} is no longer cut off: {why}")
        else:
            say("MicroBatching: padding stays in the batches: %s", why)

    def cut(
        self,
        batch: object,
        n: int,
        split: Callable[[Any, int], list[Any]] = split_batch,
        *,
        in_lockstep: bool = False,
    ) -> Parts:
        """Cut a batch into ``n`` micro-batches, or into as many as the budget of tokens needs.

        Args:
            batch: the batch.
            n: number of micro-batches if rows keep their padding.
            split: how a batch is split that keeps its padding.
            in_lockstep: whether all ranks must run the same number of micro-batches.
        """
        extents = self.padding and self.padding.read(batch)
        if self.padding is not None and extents is None:
            self._warn_of_other_batch(self.padding)
        is_cut = extents is not None and extents.may_be_cut(self.multiple_of)
        rows: list[list[int]] = []
        if extents is not None and is_cut:
            rows = self._group(extents, n)
        if in_lockstep and self.max_tokens is not None:
            n = self._agree(len(rows) or n, batch_size(batch))
        if in_lockstep and extents is not None and rows:
            if len(rows) > n:
                rows = group_rows_evenly(extents, n, self.multiple_of)
            rows = split_groups(rows, n)
        if extents is None or not rows:
            self._note(batch, extents, None)
            return WholeParts(split(batch, n))
        trimmed = trim_batch(batch, extents, rows, self.multiple_of)
        self._note(batch, extents, trimmed)
        return trimmed

    def _agree(self, needed: int, rows: int) -> int:
        """Return the number of micro-batches that all ranks run, each of at least one row."""
        numbers, sizes = zip(*from_all_ranks([(needed, rows)]), strict=True)
        most, fewest_rows = max(numbers), min(sizes)
        if most > fewest_rows and not self._has_warned:
            self._has_warned = True
            warn(
                f"MicroBatching: max_tokens={self.max_tokens} needs {most} micro-batches on one rank, but another has "
                f"{fewest_rows} rows, and each micro-batch communicates. So {fewest_rows} larger ones run."
            )
        return min(most, fewest_rows)

    def _group(self, extents: Extents, n: int) -> list[list[int]]:
        if self.max_tokens is None:
            return group_rows_evenly(extents, n, self.multiple_of)
        # The budget does not count what else is in a row, so there are no more rows than with padding.
        most_rows = -(-len(extents.rows) // n) if extents.has_more else None
        return group_rows(extents, self.max_tokens, self.multiple_of, most_rows=most_rows)

    def _note(self, batch: object, extents: Extents | None, trimmed: TrimmedParts | None) -> None:
        padded = extents.padded if extents is not None else _count_padded(batch)
        self.padded += padded
        self.computed += padded if trimmed is None else trimmed.tokens
        if self.max_tokens is not None and not self._has_warned and trimmed is not None:
            longest = max(map(trimmed.tokens_of, range(len(trimmed.parts))))
            if longest > self.max_tokens:
                self._has_warned = True
                say("MicroBatching: a row of %d tokens runs alone, above max_tokens=%d", longest, self.max_tokens)

    def share_left(self, batch: object, n: int) -> float:
        """Return the share of a batch's tokens that run if it is cut into ``n`` micro-batches; 1 without padding."""
        extents = self.padding and self.padding.read(batch)
        if extents is None:
            return 1.0
        return extents.share_of(self._group(extents, n), self.multiple_of)

    def _warn_of_other_batch(self, padding: Padding) -> None:
        if not self._has_warned:
            self._has_warned = True
            say("MicroBatching: a batch without %s runs with its padding", padding)

    def count_parts(self, batch: object, n: int) -> int:
        """Return the number of micro-batches if rows keep their padding: ``n``, or those that the budget needs.

        Raises:
            ValueError: there is a budget, and the tokens of the batch cannot be counted.
        """
        if self.max_tokens is None:
            return n
        rows, tokens = self._count(batch)
        return -(-rows // max(1, self.max_tokens * rows // tokens))

    def list_largest(self, batch: object, n: int) -> list[Any]:
        """Return micro-batches with their padding, such that none of a run in which it is cut off is larger.

        Raises:
            ValueError: there is a budget, and the tokens of the batch cannot be counted.
        """
        # Views of the copy keep all of it in memory. Without a sequence axis nothing is sorted.
        sorted_rows = walk_leaves(batch, _copy, "batch") if _count_padded(batch) else batch
        if self.max_tokens is None:
            return split_batch(sorted_rows, n)
        rows, tokens = self._count(batch)
        # Shorter rows may fill the budget, so part of another long row is counted, too.
        most = -(-self.max_tokens * rows // tokens)
        if most >= rows:
            return [sorted_rows]
        return [take_rows(sorted_rows, 0, most)] * 2

    def _count(self, batch: object) -> tuple[int, int]:
        """Return the numbers of rows and of tokens."""
        tokens = _count_padded(batch)
        if tokens == 0:
            what = f"max_tokens={self.max_tokens} with a batch whose tokens cannot be counted"
            why = f"no padding was found ({LOOKED_FOR}), and neither integers nor features have a sequence axis"
            way_out = "Use trim_padding=TrimPadding(lengths=...), or a number of micro-batches"
            raise ValueError(explain(what, why, way_out))
        return batch_size(batch), tokens


def _count_padded(batch: object) -> int:
    """Return the number of tokens of a batch with their padding; 0 where no tensor has a sequence axis."""
    most = 0
    for leaf in list_tensors(batch).values():
        # Token ids or masks, and features of shape (rows, length, features).
        if (leaf.ndim == 2 and not leaf.is_floating_point()) or leaf.ndim == 3:
            most = max(most, leaf.shape[0] * leaf.shape[1])
    return most


def _copy(leaf: object, path: str) -> Any:
    # Token ids take next to nothing beside what is computed from them; pictures and features do not.
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.clone()
    return leaf


def check_budget(max_tokens: int | None, n: int | str | None) -> int | None:
    """Raises: ValueError: neither a number of micro-batches nor a budget is given, or both are."""
    if (max_tokens is None) == (n is None):
        what = "n and max_tokens= are both given" if n is not None else "neither n nor max_tokens= is given"
        way_out = "Use MicroBatching(8), or MicroBatching(max_tokens=4096)"
        raise ValueError(explain(what, "one of them decides the number of micro-batches", way_out))
    return max_tokens
