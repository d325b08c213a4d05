"""Find how the batches of a run are split: at the loss, by a weighting rule, or at the trunk."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.data.closure.micro_batch_logging import BatchLogs, LogCall
from lightning_fasttrain.data.closure.roles import Counting, Splitter, Window
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.log_rules import LogRules, match_log_rules
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.step_weights import DeferredFlag
from lightning_fasttrain.data.normalizer.trial.looks import Looks
from lightning_fasttrain.data.normalizer.trial.sample_rows import sample_pairs
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_split
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import CollectivesWatch
from lightning_fasttrain.data.padding.trim_search import Parts
from lightning_fasttrain.data.split_batch import split_batch
from lightning_fasttrain.data.step_gradients import own_scaling
from lightning_fasttrain.data.trunk.batch_search import BatchSearch, Found, guess_split, say_trunk
from lightning_fasttrain.data.trunk.find_trunk import name_trunk
from lightning_fasttrain.data.trunk.micro_batch_forward import MicroBatchedForward, Trunk

_MOST_LOG_LOOKS = 8  # batches in which samples run again to decide the weights of a logged value
_MOST_PAIRS = 4


class SplitSearch:
    """Finds how the batches of a run are split, and searches again where a batch differs from earlier ones.

    Attributes:
        micro: the technique that splits batches, if there is one.
        window: the technique that sums batches, if there is one.
        split: how losses are split.
        trunk: the submodules that run in micro-batches where the loss cannot be split.
        forwards: the trunk's forwards.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.micro: Splitter | None = None
        self.window: Window | None = None
        self.split = guess_split()
        self.trunk: Trunk | None = None
        self.forwards: list[MicroBatchedForward] = []
        self._undo_trunk: Undo = lambda: None
        self._looks = Looks()
        self._collectives = CollectivesWatch()
        self._log_looks = 0
        self._differing: dict[str, DeferredFlag] = {}

    def look_at(self, batch: object, rest: list[Any]) -> None:
        """Search before a batch: the first shows how to split it, and later ones may show more."""
        micro = self.micro
        # Such strategies count the collectives of a step, and detect a failed rank by a vote of their own.
        votes = micro is not None and micro.adaptive and self.trainer.world_size > 1
        is_due = not votes and self._looks.is_due(lambda: self._may_show_more(batch))
        if micro is not None:
            # Before any search, whose samples must fit in memory as a micro-batch does.
            micro.n = micro.trimming.count_parts(batch, micro.n)
        if self.split.provisional or is_due:
            self._find_split(batch, rest)
        # From the second batch on, a rank may have failed outside of a vote, and the others would wait for it here.
        if micro is not None and micro.split is split_batch and not (votes and micro.trimming.looks.has_begun):
            split = self.split if self.trunk is None else None
            micro.trimming.look_at(lambda: self._stage(rest), batch, split, micro.n, self._counting.check)

    def _may_show_more(self, batch: object) -> bool:
        """Whether a later batch could change the result."""
        if self.micro is None or not self._counting.check or self.split.read is None:
            return False
        return self.micro.split is not split_batch or (can_be_cut(batch) and batch_size(batch) > 1)

    def size_of(self, batch: object) -> Number:
        """Return an estimate of what the loss of a batch is divided by."""
        if self.split.is_sum:
            return 1
        if self.split.count is not None:
            return self.split.count(batch)
        return self.split.per_sample * (batch_size(batch) if can_be_cut(batch) else 1)

    def _find_split(self, batch: object, rest: list[Any]) -> None:
        micro, search = self.micro, self._search(batch, rest)
        if micro is not None and micro.through is not None and self.trunk is None:
            trunk = name_trunk(search.stage, search.samples(), batch, search.n, micro.through)
            say_trunk(trunk, "as given by through=")
            self._use(trunk)
        if self.trunk is not None and self.window is None:
            return
        is_one = search.split is split_batch and can_be_cut(batch) and batch_size(batch) < 2
        if is_one and self.window is None and self.trainer.world_size == 1:
            return  # its weight is 1; with several ranks, the others would wait
        with self._looks.timed():
            found = search.find(self.split)
        self._use(found)

    def _use(self, found: Found) -> None:
        """Use this split from now on, and pass it to the techniques."""
        if self.micro is not None and self.micro.adaptive and self.trainer.world_size > 1:
            self._collectives.refuse()
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

    def settle_logs(self, batch: object, cut: Parts, rest: list[Any], logs: BatchLogs) -> LogRules:
        """Decide how logged values are weighted where the rules that matched so far differ in this batch.

        A value may be the same in all samples of the first batch, such as an accuracy of 0 before training, and then
        any rule matches. A few pairs of samples are run from the micro-batches with the largest and the smallest value.
        """
        is_possible = self.micro is not None and self.micro.split is split_batch and self.trainer.world_size == 1
        if not is_possible or self._log_looks == _MOST_LOG_LOOKS:
            return logs.rules
        # What is on a device is read in a later batch.
        for name in logs.seen.keys() - self._differing.keys():
            differ = logs.compare_rules(name)
            if differ is not None:
                self._differing[name] = DeferredFlag(differ)
        differing: list[str] = []
        for name in logs.seen:
            is_known = name in self._differing and self._differing[name].is_known
            if is_known and self._differing.pop(name).read():
                differing.append(name)
        if differing:
            self._log_looks += 1
            # One name is enough to choose rows: what differs in one value mostly differs in the others.
            first, second = _pick_rows(cut, logs.seen[differing[0]])
            rules = dict(self.split.log_rules)
            with self._looks.timed():
                for pair in sample_pairs(batch, first[:_MOST_PAIRS], itertools.cycle(second)):
                    trial = try_split(self._stage(rest), iter([pair]))
                    for name in differing:
                        rules[name] = match_log_rules(self.split, name, rules[name], [trial])
            self._use(replace(self.split, log_rules=rules))
        return self.split.log_rules

    @property
    def runs_in_lockstep(self) -> bool:
        """Whether all ranks must run the same number of micro-batches, since each of them communicates."""
        if self.trainer.world_size == 1:
            return False
        return is_sharded(self.trainer.lightning_module) or own_scaling(self.trainer.strategy) is not None

    def leave_trunk(self) -> None:
        """Restore the trunk's forwards at the end of the run."""
        self._undo_trunk()
        self.trunk, self.forwards = None, []

    def find_another(
        self, batch: object, rest: list[Any], error: OtherSplitError, attempt: int, is_first: bool
    ) -> None:
        """Search again for a batch whose loss is split differently; none of its gradients have been used yet."""
        if not is_first:
            what = "MicroBatching inside an accumulation window"
            why = f"this batch is split unlike earlier ones, whose gradients are in the sum: {error}"
            way_out = "Use TokenWeightedAccumulation, or name the trunk with through="
            raise ValueError(explain(what, why, way_out)) from error
        search = self._search(batch, rest)
        found = search.find_another(self.split, error, attempt)
        if isinstance(found, LossSplit):
            say("MicroBatching: %s; from here on each micro-batch is weighted by %s", error, found)
        self._use(found)

    def _search(self, batch: object, rest: list[Any]) -> BatchSearch:
        """Return the search on this batch."""
        rule = self._counting
        search = BatchSearch(self._stage(rest), batch, 1, split_batch, rule.count, rule.check, rule.found_before)
        if self.micro is not None:
            search = replace(search, n=self.micro.n, split=self.micro.split)
        return replace(search, is_window=self.window is not None, whole_batches=self.micro is None)

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
        return list(filter(None, (self.micro, self.window)))


def _pick_rows(cut: Parts, seen: Sequence[LogCall]) -> tuple[list[int], list[int]]:
    """Return rows of the micro-batches that logged the largest and the smallest value."""
    # A micro-batch without targets logs NaN, which is taken as the smallest value.
    values = torch.tensor([float(call.value) for call in seen]).abs().nan_to_num(-1.0)
    return cut.rows_of(seen[int(values.argmax())].part), cut.rows_of(seen[int(values.argmin())].part)
