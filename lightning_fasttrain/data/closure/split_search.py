"""Find how the batches of a run are split: at the loss, by a weighting rule, or at the trunk."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.data.closure.micro_batch_logging import BatchLogs, LogCall
from lightning_fasttrain.data.closure.roles import Counting, Splitter, Window
from lightning_fasttrain.data.normalizer.count_targets import CountRule, count_targets
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.log_rules import LogRules, settle_log_rules
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.step_weights import DeferredFlag
from lightning_fasttrain.data.normalizer.trial.looks import Looks
from lightning_fasttrain.data.normalizer.trial.sample_rows import sample_pairs
from lightning_fasttrain.data.normalizer.trial.try_split import Stage
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import CollectivesWatch
from lightning_fasttrain.data.padding.trim_search import Parts
from lightning_fasttrain.data.split_batch import split_batch
from lightning_fasttrain.data.step_gradients import own_scaling
from lightning_fasttrain.data.trunk.batch_search import BatchSearch, say_trunk
from lightning_fasttrain.data.trunk.find_trunk import name_trunk, refuse_dependent_samples
from lightning_fasttrain.data.trunk.micro_batch_forward import MicroBatchedForward, Trunk

_NAME = "MicroBatching"
_MOST_LOG_LOOKS = 8  # batches in which samples run again to decide the weights of a logged value
_MOST_PAIRS = 4


class SplitSearch:
    """Finds how the batches of a run are split, and searches again where a batch differs from earlier ones.

    Attributes:
        micro: the technique that splits batches, if there is one.
        window: the technique that sums batches, if there is one.
        split: how losses are split; None before the first batch.
        trunk: the submodules that run in micro-batches where the loss cannot be split.
        forwards: the trunk's forwards.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.micro: Splitter | None = None
        self.window: Window | None = None
        self.split: LossSplit | None = None
        self.trunk: Trunk | None = None
        self.forwards: list[MicroBatchedForward] = []
        self._undo_trunk: Undo = _do_nothing
        self._looks = Looks()
        self._collectives = CollectivesWatch()
        self._log_looks = 0
        self._differing: dict[str, DeferredFlag] = {}

    def look_at(self, batch: Any, rest: list[Any]) -> None:
        """Search before a batch: the first shows how to split it, and later ones may show more."""
        micro = self.micro
        # Such strategies count the collectives of a step, and detect a failed rank by a vote of their own.
        votes = micro is not None and micro.adaptive and self.trainer.world_size > 1
        is_due = not votes and self._looks.is_due(lambda: self._may_show_more(batch))
        if micro is not None:
            # Before any search, whose samples must fit in memory as a micro-batch does.
            micro.n = micro.trimming.count_parts(batch, micro.n)
        if self.split is None and self._takes_shared():
            return
        if self.split is None or self.split.provisional or is_due:
            self._find_split(batch, rest)
        if micro is not None and self._may_be_trimmed(micro, votes):
            split = self.split if self.trunk is None else None
            micro.trimming.look_at(lambda: self._stage(rest), batch, split, micro.n)
            if micro.shared is not None:
                micro.shared.trimming = micro.trimming

    def _may_be_trimmed(self, micro: Splitter, votes: bool) -> bool:
        """Whether padding may be looked for in this batch, which all ranks answer identically."""
        # From the second batch on, a rank may have failed outside of a vote, and the others would wait for it here.
        if votes and micro.trimming.looks.has_begun:
            return False
        is_tried = self._counting.check or micro.trimming.wanted
        return bool(is_tried) and micro.split is split_batch and micro.trimming.is_open

    def _may_show_more(self, batch: Any) -> bool:
        """Whether a later batch could change the result."""
        if self.micro is None or not self._counting.check or self.split is None or self.split.read is None:
            return False
        return self.micro.split is not split_batch or (can_be_cut(batch) and batch_size(batch) > 1)

    def _takes_shared(self) -> bool:
        """Whether a copy's result can be used; with several ranks more than the loss is examined."""
        looks_further = self.micro is not None and (self.micro.adaptive or self.micro.through is not None)
        shared = self._counting.shared
        if shared is None or shared.split is None or looks_further or self.trainer.world_size > 1:
            return False
        self._looks.seconds = shared.seconds  # as if this copy had searched
        self._use(shared.split)
        if self.micro is not None and shared.trimming is not None:
            self.micro.trimming.take(shared.trimming)
        return True

    def size_of(self, batch: Any) -> Number:
        """Return an estimate of what the loss of a batch is divided by."""
        split = self.split or LossSplit(None, count_targets)
        if split.is_sum:
            return 1
        if split.count is not None:
            return split.count(batch)
        return split.per_sample * (batch_size(batch) if can_be_cut(batch) else 1)

    def _find_split(self, batch: Any, rest: list[Any]) -> None:
        through = None if self.micro is None else self.micro.through
        search = self._search(batch, rest)
        if through is not None and self.trunk is None:
            trunk = name_trunk([self.trainer.lightning_module], through)
            refuse_dependent_samples(search.stage, search.samples(), batch, search.n, trunk)
            say_trunk(_NAME, trunk, "as given by through=")
            self._use(trunk)
        if self.trunk is not None and self.window is None:
            return
        is_one = search.split is split_batch and can_be_cut(batch) and batch_size(batch) < 2
        if is_one and self.window is None and self.trainer.world_size == 1:
            return  # its weight is 1; with several ranks, the others would wait
        with self._looks.timed(), self._refusing(search):
            found = search.find(self.split)
        self._use(found)

    @contextmanager
    def _refusing(self, search: BatchSearch) -> Iterator[None]:
        """Refuse what a search shows: windows of a loss that cannot be split, and steps that communicate."""
        try:
            yield
        except CannotSplitError as error:
            if self.micro is None or self.window is None or search.count != "auto":
                raise
            # Naming a trunk would not help here.
            what = f"{_NAME} with {type(self.window).__name__}"
            why = f"{error.why}, and the samples of several batches are never in memory together"
            way_out = "Use larger batches in more micro-batches, or give count= a function"
            raise ValueError(explain(what, why, way_out)) from None
        # With sharded parameters, each forward communicates.
        if self.micro is not None and self.micro.adaptive and search.stage.gradients:
            self._collectives.refuse()

    def _use(self, found: LossSplit | Trunk | None) -> None:
        """Use this split from now on, and pass it to the techniques."""
        if isinstance(found, Trunk):
            if self.micro is not None:
                self.micro.trimming.refuse_trunk(found)
            if self.trunk is None:
                self.forwards, self._undo_trunk = found.install(1)
            self.trunk = found
            found = LossSplit(None, CountRule("sum"))  # a single micro-batch
        self.split = found
        for technique in self._techniques:
            technique.found = self.split
            if technique.shared is not None and self.trunk is None and found is not None and not found.provisional:
                technique.shared.split, technique.shared.seconds = found, self._looks.seconds

    def settle_logs(self, batch: Any, cut: Parts, rest: list[Any], logs: BatchLogs) -> LogRules:
        """Decide how logged values are weighted where the rules that matched so far differ in this batch.

        A value may be the same in all samples of the first batch, such as an accuracy of 0 before training, and then
        any rule matches. A few pairs of samples are run from the micro-batches with the largest and the smallest value.
        """
        if self.split is None or self.trainer.world_size > 1 or self._log_looks == _MOST_LOG_LOOKS:
            return logs.rules
        differing: dict[str, Sequence[LogCall]] = {}
        for name, seen in (*logs.logged.items(), *logs.returned.items()):
            if self._is_known(name, logs.rules_differ(name, seen)):
                differing[name] = seen
        if differing and self.micro is not None and self.micro.split is split_batch:
            self._log_looks += 1
            # One name is enough to choose rows: what differs in one value mostly differs in the others.
            first, second = _pick_rows(cut, next(iter(differing.values())))
            stage, pairs = self._stage(rest), sample_pairs(batch, first, second)
            with self._looks.timed():
                settled = settle_log_rules(self.split, differing, stage, pairs)
            self._use(replace(self.split, log_rules={**self.split.log_rules, **settled}))
        return self.split.log_rules

    def _is_known(self, name: str, differ: bool | Tensor) -> bool:
        """Whether the rules of a name are known to differ; what is on a device is read in a later batch."""
        if isinstance(differ, bool):
            return differ
        earlier = self._differing.get(name)
        if earlier is None:
            self._differing[name] = DeferredFlag(differ)
        elif earlier.is_known:
            del self._differing[name]
            return earlier.read()
        return False

    @property
    def runs_in_lockstep(self) -> bool:
        """Whether all ranks must run the same number of micro-batches, since each of them communicates."""
        if self.trainer.world_size == 1:
            return False
        return is_sharded(self.trainer.lightning_module) or own_scaling(self.trainer.strategy) is not None

    def leave_trunk(self) -> None:
        """Restore the trunk's forwards at the end of the run."""
        self._undo_trunk()
        self.trunk, self.forwards, self._undo_trunk = None, [], _do_nothing

    def find_another(self, batch: Any, rest: list[Any], error: OtherSplitError, attempt: int, is_first: bool) -> None:
        """Search again for a batch whose loss is split differently; none of its gradients have been used yet."""
        if not is_first:
            what = "MicroBatching inside an accumulation window"
            why = f"this batch is split unlike earlier ones, whose gradients are in the sum: {error}"
            raise ValueError(
                explain(what, why, "Use TokenWeightedAccumulation, or name the trunk with through=")
            ) from error
        assert self.split is not None
        search = self._search(batch, rest)
        with self._refusing(search):
            found = search.find_another(self.split, error, attempt)
        if isinstance(found, LossSplit):
            say("%s: %s; from here on each micro-batch is weighted by %s", _NAME, error, found)
        self._use(found)

    def _search(self, batch: Any, rest: list[Any]) -> BatchSearch:
        """Return the search on this batch."""
        technique = self._counting
        n, split = (1, split_batch) if self.micro is None else (self.micro.n, self.micro.split)
        return BatchSearch(
            _NAME,
            self._stage(rest),
            batch,
            n,
            split,
            technique.count,
            technique.check,
            technique.found_before,
            is_window=self.window is not None,
            whole_batches=self.micro is None,
        )

    def _stage(self, rest: list[Any]) -> Stage:
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        sharded = is_sharded(module)
        # Bypass the strategy where possible, so that nothing is synchronized and no engine waits for a backward.
        training_step = strategy.training_step if sharded else module.training_step
        return Stage(
            self._collectives.wrap(lambda rows: training_step(rows, *rest)),
            [module],
            strategy.precision_plugin.train_step_context,
            gradients=not sharded,
            may_skip=True,
            may_scale=self.window is not None or not (sharded or own_scaling(strategy)),
        )

    @property
    def _counting(self) -> Counting:
        """The technique whose ``count`` is used: if one is given, it serves both."""
        given = [technique for technique in self._techniques if technique.count != "auto"]
        return (given or self._techniques)[0]

    @property
    def _techniques(self) -> list[Counting]:
        return [technique for technique in (self.micro, self.window) if technique is not None]


def _pick_rows(cut: Parts, seen: Sequence[LogCall]) -> tuple[list[int], list[int]]:
    """Return rows of the micro-batches that logged the largest and the smallest value."""
    # A micro-batch without targets logs NaN, which is taken as the smallest value.
    values = torch.tensor([float(call.value) for call in seen]).abs().nan_to_num(-1.0).tolist()
    rows: list[list[int]] = []
    for value in (max(values), min(values)):
        rows.append(cut.rows_of(seen[values.index(value)].part))
    first, second = rows
    return first[:_MOST_PAIRS], list(itertools.islice(itertools.cycle(second), _MOST_PAIRS))


def _do_nothing() -> None:
    pass
