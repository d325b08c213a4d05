"""The closure of Lightning's automatic optimization that runs one batch in micro-batches.

Lightning runs ``training_step`` → ``zero_grad`` → ``backward`` once a batch, so gradients made inside ``training_step``
would be erased. Here the closure of a batch is ``zero_grad`` → (``training_step`` → ``backward``) × n, through the
strategy's own methods, so that autocast, loss scaling, forward redirection and profiling work as usual.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut, pick_rows, split_batch
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.host.host_answers import answer_on_host
from lightning_fasttrain.core.host.lightning import (
    BackwardHooks,
    accumulation_continues,
    call_strategy,
    plain_closure,
    replace_closures,
    replaced_closures,
    zero_grad_of_batch,
)
from lightning_fasttrain.core.messages import explain, note_once, say
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.micro_batching.find_backbone import (
    OUT_OF_TRIES,
    TRIES,
    BatchSearch,
    Found,
    Through,
    guess_split,
    name_backbone,
    say_backbone,
)
from lightning_fasttrain.micro_batching.micro_batch_forward import Backbone, MicroBatchedForward
from lightning_fasttrain.micro_batching.micro_batch_graphs import RunGraphs
from lightning_fasttrain.micro_batching.micro_batch_logging import BatchLogs, combine_outputs, pick_groups
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count, CountRule
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError
from lightning_fasttrain.micro_batching.normalizer.split_rule import (
    LogRules,
    LossSplit,
    OtherSplitError,
    match_log_rules,
)
from lightning_fasttrain.micro_batching.normalizer.step_weights import StepWeights
from lightning_fasttrain.micro_batching.out_of_memory import (
    CollectivesWatch,
    FittingSearch,
    FurtherSavings,
    split_until_it_fits,
)
from lightning_fasttrain.micro_batching.padding.trim_search import Parts, TrimSearch, WholeParts
from lightning_fasttrain.micro_batching.step_gradients import (
    Float32GradientSums,
    StepGradients,
    add_gradients,
    own_scaling,
    takes_float32_gradients,
)
from lightning_fasttrain.trial.read_normalizers import Number
from lightning_fasttrain.trial.runs import loss_of
from lightning_fasttrain.trial.sample_rows import Sample, sample_groups
from lightning_fasttrain.trial.try_split import TrialSchedule, TrialStep, try_split


class Counting(Protocol):
    """The attributes that both kinds of technique have for the weighting of micro-batches."""

    count: Count
    check: bool
    found: LossSplit | None
    found_before: CountRule | None


class Splitter(Counting, Protocol):
    """A technique that runs a batch in micro-batches."""

    n: int
    cuda_graph: bool
    adaptive: bool
    parts: int
    split: Callable[[Any, int], list[Any]]
    savings: FurtherSavings
    fitting: FittingSearch
    through: Through | None
    trimming: TrimSearch


class Window(Counting, Protocol):
    """A technique that sums the gradients of several batches."""

    reference: Any

    @property
    def holds_one_batch(self) -> bool: ...

    def take_reference(self, trainer: L.Trainer, size: Number) -> None: ...

    def add(self, targets: Number, optimizer: Optimizer) -> None: ...


_MOST_LOG_LOOKS = 8  # batches in which samples run again to decide the weights of a logged value
_MOST_GROUPS = 16


class SplitSearch:
    """Finds how the batches of a run are split, and searches again where a batch differs from earlier ones.

    Attributes:
        micro: the technique that splits batches, if there is one.
        window: the technique that sums batches, if there is one.
        split: how losses are split.
        backbone: the submodules that run in micro-batches where the loss cannot be split.
        forwards: the backbone's forwards.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.micro: Splitter | None = None
        self.window: Window | None = None
        self.split = guess_split()
        self.backbone: Backbone | None = None
        self.forwards: list[MicroBatchedForward] = []
        self._undo_backbone: Undo = lambda: None
        self._trial_schedule = TrialSchedule()
        self._collectives = CollectivesWatch()
        self._log_looks = 0
        self._differing: dict[str, AsyncReading] = {}

    def examine(self, batch: object, rest: list[Any]) -> None:
        """Search before a batch: the first shows how to split it, and later ones may show more."""
        micro = self.micro
        # Such strategies count the collectives of a step, and detect a failed rank by a vote of their own.
        votes = micro is not None and micro.adaptive and self.trainer.world_size > 1
        is_due = not votes and self._trial_schedule.is_due(lambda: self._may_show_more(batch))
        if micro is not None:
            # Before any search, whose samples must fit in memory as a micro-batch does.
            micro.n = micro.trimming.count_parts(batch, micro.n)
        if self.split.provisional or is_due:
            self._find_split(batch, rest)
        # From the second batch on, a rank may have failed outside of a vote, and the others would wait for it here.
        if micro is not None and micro.split is split_batch and not (votes and micro.trimming.trial_schedule.has_begun):
            split = self.split if self.backbone is None else None
            micro.trimming.examine(lambda: self._trial_step(rest), batch, split, micro.n, self._counting.check)

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
        if micro is not None and micro.through is not None and self.backbone is None:
            backbone = name_backbone(search.trial_step, search.samples(), batch, search.n, micro.through)
            say_backbone(backbone, "as given by through=")
            self._use(backbone)
        if self.backbone is not None and self.window is None:
            return
        is_one = search.split is split_batch and can_be_cut(batch) and batch_size(batch) < 2
        if is_one and self.window is None and self.trainer.world_size == 1:
            return  # its weight is 1; with several ranks, the others would wait
        with self._trial_schedule.timed():
            found = search.find(self.split)
        self._use(found)

    def _use(self, found: Found) -> None:
        """Use this split from now on, and pass it to the techniques."""
        if self.micro is not None and self.micro.adaptive and self.trainer.world_size > 1:
            self._collectives.refuse()
        if isinstance(found, Backbone):
            if self.micro is not None:
                self.micro.trimming.refuse_backbone(found)
            if self.backbone is None:
                self.forwards, self._undo_backbone = found.install(1)
            self.backbone = found
            found = LossSplit(None, CountRule("sum"))  # a single micro-batch
        self.split = found
        for technique in self._techniques:
            technique.found = self.split

    def settle_logs(self, batch: object, cut: Parts, rest: list[Any], logs: BatchLogs) -> LogRules:
        """Decide how logged values are weighted where the rules that matched so far differ in this batch.

        A value may be the same in all samples of the first batch, such as an accuracy of 0 before training, and then
        any rule matches. A few rows are run of the micro-batches with the largest and the smallest value.
        """
        is_possible = self.micro is not None and self.micro.split is split_batch and self.trainer.world_size == 1
        if not is_possible or self._log_looks == _MOST_LOG_LOOKS:
            return logs.rules
        # What is on a device is read in a later batch.
        for name in logs.seen.keys() - self._differing.keys():
            differ = logs.compare_rules(name)
            if differ is not None:
                self._differing[name] = AsyncReading(differ)
        differing: list[str] = []
        for name in logs.seen:
            is_known = name in self._differing and self._differing[name].is_done
            if is_known and self._differing.pop(name).wait():
                differing.append(name)
        if differing:
            self._log_looks += 1
            with self._trial_schedule.timed():
                self._try_log_rules(batch, cut, rest, logs, differing)
        return self.split.log_rules

    def _try_log_rules(self, batch: object, cut: Parts, rest: list[Any], logs: BatchLogs, names: Sequence[str]) -> None:
        """Run rows of a batch until the rules that are left for each of these names give one value."""
        trial_step, tries = replace(self._trial_step(rest), in_turn=False), 0
        for name in names:
            for sample in sample_groups(batch, pick_groups(cut, logs.seen[name])):
                differ = logs.compare_rules(name)
                if differ is None or not differ or tries == _MOST_GROUPS:
                    break
                tries += 1
                trial = try_split(trial_step, iter([sample]))
                matching = {one: match_log_rules(self.split, one, logs.rules[one], [trial]) for one in names}
                logs.rules = {**logs.rules, **matching}
        self._use(replace(self.split, log_rules=logs.rules))

    def skips(self, batch: object, rows: list[int], rest: list[Any]) -> bool:
        """Whether the step returns None for these rows together; assumed where the user's function splits batches."""
        if self.micro is None or self.micro.split is not split_batch:
            return True
        sample = Sample(pick_rows(batch, rows), len(rows), [])
        with torch.no_grad():
            trial = try_split(replace(self._trial_step(rest), gradients=False, in_turn=False), iter([sample]))
        return trial.is_skipped

    @property
    def runs_in_lockstep(self) -> bool:
        """Whether all ranks must run the same number of micro-batches, since each of them communicates."""
        if self.trainer.world_size == 1:
            return False
        return is_sharded(self.trainer.lightning_module) or own_scaling(self.trainer.strategy) is not None

    def leave_backbone(self) -> None:
        """Restore the backbone's forwards at the end of the run."""
        self._undo_backbone()
        self.backbone, self.forwards = None, []

    def find_another(
        self, batch: object, rest: list[Any], error: OtherSplitError, attempt: int, is_first: bool
    ) -> None:
        """Search again for a batch whose loss is split differently; none of its gradients have been used yet."""
        found: Found | None = None
        if is_first or self.window is not None:
            found = self._search(batch, rest).find_another(self.split, error, attempt)
        if found is None or not (is_first or self.split.counts_as(found)):
            what = f"{type(self.window or self.micro).__name__} inside an accumulation window"
            why = f"this batch is split unlike earlier ones, whose gradients are in the sum: {error}"
            way_out = "Use TokenWeightedAccumulation, or name the backbone with through="
            if self.window is not None:
                way_out = "Give count= a function (of a batch: the number of terms its loss averages over)"
            raise ValueError(explain(what, why, way_out)) from error
        if isinstance(found, LossSplit):
            say("%s; from here on each batch, or micro-batch of one, is weighted by %s", error, found)
        self._use(found)

    def _search(self, batch: object, rest: list[Any]) -> BatchSearch:
        """Return the search on this batch."""
        rule = self._counting
        search = BatchSearch(self._trial_step(rest), batch, 1, split_batch, rule.count, rule.check, rule.found_before)
        if self.micro is not None:
            search = replace(search, n=self.micro.n, split=self.micro.split)
        return replace(search, is_window=self.window is not None, whole_batches=self.micro is None)

    def _trial_step(self, rest: list[Any]) -> TrialStep:
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        sharded = is_sharded(module)
        # Bypass the strategy where possible, so that no engine waits for a backward.
        training_step = strategy.training_step if sharded else module.training_step
        return TrialStep(
            self._collectives.wrap(lambda rows: training_step(rows, *rest)),
            [module],
            strategy.precision_plugin.train_step_context,
            gradients=not sharded,
            may_skip=True,
            may_scale=self.window is not None or not (sharded or own_scaling(strategy)),
        )

    @property
    def checks(self) -> bool:
        """Whether what would change the training is refused."""
        return self._counting.check

    @property
    def _counting(self) -> Counting:
        """The technique whose ``count`` is used: if one is given, it serves both."""
        given = [technique for technique in self._techniques if technique.count != "auto"]
        return (given or self._techniques)[0]

    @property
    def _techniques(self) -> list[Counting]:
        return list(filter(None, (self.micro, self.window)))


_MANY = 2**16  # upper limit where only the user's split function knows the number of samples


class BatchClosures:
    """Create the closures of Lightning's automatic optimization for a run that splits or sums batches."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.search = SplitSearch(trainer)
        self.metrics: dict[int, Metric] = {}  # logged per step, as found in the first batch
        self.sums = Float32GradientSums()
        self.graphs: RunGraphs | None = None
        self._restore = replace_closures(trainer, self)

    @classmethod
    def join(
        cls,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        micro: Splitter | None = None,
        window: Window | None = None,
    ) -> Undo:
        """Register a technique with this trainer's closures; the returned function unregisters it."""
        name = type(micro or window).__name__
        if not pl_module.automatic_optimization:
            why = "the module runs backward itself, so there is no step to split"
            function = "accumulate_window(step, batches" if micro is None else "accumulate_gradients(step, batch, n"
            way_out = f"In your training_step call {function}, backward=self.manual_backward), with step: batch → loss"
            raise ValueError(explain(f"{name} with automatic_optimization=False", why, way_out))
        if trainer.strategy is not None and trainer.strategy.handles_gradient_accumulation:
            why = "this strategy counts micro-batches itself and decides by its own count when to step"
            way_out = "Use accumulate_grad_batches with a smaller batch"
            raise ValueError(explain(f"{name} with {type(trainer.strategy).__name__}", why, way_out))
        # One closure serves both kinds of technique, since a second one would replace the first.
        closures = replaced_closures(trainer)
        if not isinstance(closures, cls):
            closures = cls(trainer)
        ends = ExitStack()
        if trainer.strategy.root_device.type != "cpu":
            ends.callback(answer_on_host(trainer, pl_module))
        search = closures.search
        search.micro = micro or search.micro
        search.window = window or search.window
        if micro is not None and micro.cuda_graph:
            closures.graphs = RunGraphs(trainer)
            ends.callback(closures.graphs.close)

        def leave() -> None:
            ends.close()
            if micro is not None:
                search.micro = None
                search.leave_backbone()
            if window is not None:
                search.window = None
            if search.micro is None and search.window is None:
                closures.sums.finish()
                closures._restore()

        return leave

    def __call__(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        if self._is_plain():
            return plain_closure(self.trainer, kwargs, optimizer, batch_idx)
        zero_grad = zero_grad_of_batch(self.trainer, batch_idx, optimizer)
        return Closure(step_fn=lambda: self._run(kwargs, optimizer, zero_grad))

    def _is_plain(self) -> bool:
        """Whether the weight is always 1 (one micro-batch in a window of one batch), as in Lightning's own closure."""
        micro = self.search.micro
        is_whole = micro is None or not (micro.n > 1 or micro.adaptive or micro.trimming.is_asked_for)
        return is_whole and (self.search.window is None or self.search.window.holds_one_batch)

    def _run(
        self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, zero_grad: Callable[[], None] | None
    ) -> ClosureResult:
        if zero_grad is not None:
            zero_grad()
        if "any" in kwargs:  # Lightning's name for the iterator argument of such a step
            why = "the module fetches its batches itself, so there is no batch to split"
            raise TypeError(explain("training_step(self, dataloader_iter)", why, "Take `batch` in training_step"))
        batch, *rest = kwargs.values()
        self.search.examine(batch, rest)
        for attempt in range(TRIES):
            try:
                return _BatchRun(self, batch, rest, optimizer).run()
            except _SkippedBatch as skipped:
                return self._skip(optimizer, zero_grad, has_gradients=skipped.args[0])
            except OtherSplitError as error:
                self.search.find_another(batch, rest, error, attempt, is_first=zero_grad is not None)
                # The micro-batches that ran have left gradients with the wrong weights.
                if zero_grad is not None:
                    zero_grad()
        raise CannotSplitError(OUT_OF_TRIES)

    def _skip(self, optimizer: Optimizer, zero_grad: Callable[[], None] | None, has_gradients: bool) -> ClosureResult:
        """Leave a batch out, as Lightning does where the unsplit step returns None.

        Raises: RuntimeError: its gradients are in a sum with those of other batches.
        """
        if zero_grad is not None:
            zero_grad()
        elif has_gradients:
            what = "training_step returned None for one micro-batch inside an accumulation window"
            why = "the unsplit step would skip the batch, and its other micro-batches are in the sum already"
            raise RuntimeError(explain(what, why, "Return a loss of zero, or leave such batches out of the loader"))
        note_once("MicroBatching: the batch is skipped, since training_step returned None for a micro-batch of it")
        if self.search.window is not None:
            self.search.window.add(0, optimizer)
        if not accumulation_continues(self.trainer):
            self.sums.finish()
        return ClosureResult.from_training_step_output(None, self.trainer.accumulate_grad_batches)


class _SkippedBatch(Exception):
    """Raised where the unsplit step would return None; its argument: whether micro-batches have added gradients."""


class _Ran(NamedTuple):
    """A batch that has run in micro-batches."""

    weights: StepWeights
    output: Any  # what the unsplit step would have returned
    logs: BatchLogs


class _BatchRun:
    """Runs one batch in micro-batches, split as the search says.

    Args:
        closures: what is kept from batch to batch.
        batch: the batch.
        rest: the further arguments of ``training_step``.
        optimizer: the optimizer of this step.
    """

    def __init__(self, closures: BatchClosures, batch: object, rest: list[Any], optimizer: Optimizer) -> None:
        self.trainer, self.search = closures.trainer, closures.search
        self.window, self.sums, self.metrics = closures.search.window, closures.sums, closures.metrics
        self.batch, self.rest, self.optimizer, self.graphs = batch, rest, optimizer, closures.graphs

    def run(self) -> ClosureResult:
        """Run the batch, and log what it logged. Raises: OtherSplitError: its loss is split differently."""
        micro = self.search.micro
        if self.window is not None:
            self.window.take_reference(self.trainer, self.search.size_of(self.batch))
        hooks = BackwardHooks(self.trainer)
        if micro is None:
            ran = self._run_parts(WholeParts([self.batch]))
        else:
            with hooks.held():
                ran = self._run_until_it_fits(micro) if micro.adaptive else self._run_in(micro, self.batch, micro.n)
        # What may wait for other ranks comes after all micro-batches have fitted.
        ran.logs.pass_on()
        if self.window is not None:
            self.window.add(ran.weights.total, self.optimizer)
        if not (accumulation_continues(self.trainer) or takes_float32_gradients(self.optimizer)):
            self.sums.finish()
        hooks.call_after()
        return ClosureResult.from_training_step_output(ran.output, self.trainer.accumulate_grad_batches)

    def _run_in(self, micro: Splitter, batch: object, n: int) -> _Ran:
        """Run a batch in ``n`` micro-batches: the whole step for each, or the backbone alone."""
        if self.search.backbone is None:
            cut = micro.trimming.cut(batch, n, micro.split, in_lockstep=self.search.runs_in_lockstep)
            micro.parts = len(cut.parts)
            with micro.trimming.attention():
                return self._run_parts(cut)
        for forward in self.search.forwards:
            forward.n = n
        micro.parts = n
        return self._run_parts(WholeParts([batch]))

    def _run_until_it_fits(self, micro: Splitter) -> _Ran:
        most = batch_size(self.batch) if micro.split is split_batch else _MANY

        def attempt(n: int) -> _Ran:
            return self._run_in(micro, self.batch, n)

        module, fitting = self.trainer.lightning_module, micro.fitting
        left, agree = micro.savings.list_left(module), fitting.agree
        with fitting.run_alone(), fitting.restorable(module) as state:  # ranks share buffers at its beginning
            ran, micro.n = split_until_it_fits(attempt, module, micro.n, most, then=left, agree=agree, state=state)
        fitting.join()
        return ran

    def _run_parts(self, cut: Parts) -> _Ran:
        """Run forward and backward of each micro-batch, and combine what they logged and returned."""
        if len(cut.parts) > 1:
            self._refuse_own_backward()
        # A window's total is not known yet: a constant stands in, and is divided out when the window is full.
        reference = None if self.window is None else self.window.reference
        split = self.search.split
        weights = StepWeights(split, cut.parts, reference)
        logs = BatchLogs(self.trainer.lightning_module, cut.parts, split.log_rules, self.metrics)
        with logs.collecting():
            outputs = self._forward_backward(cut, weights, logs)
        counts = weights.counts
        # A mean that is logged beside a loss that is a sum has no normalizer to take from it.
        if split.is_sum:
            counts = [batch_size(cut.parts[part]) for part in weights.held]
        logs.loss_counts = dict(zip(weights.held, counts, strict=True))
        if len(cut.parts) > 1:
            logs.rules = self.search.settle_logs(self.batch, cut, self.rest, logs)
        return _Ran(weights, combine_outputs(outputs, cut, weights, logs), logs)

    def _refuse_own_backward(self) -> None:
        """Raises: ValueError: the module overrides ``backward``, which would act on parts of the loss."""
        module = self.trainer.lightning_module
        if is_overridden("backward", module) and self.search.checks:
            what = f"MicroBatching with {type(module).__name__}.backward"
            why = "the method would run for each micro-batch, on a part of the loss and of the gradient"
            way_out = "Change gradients in on_after_backward, which is called once a batch, or pass check=False"
            raise ValueError(explain(what, why, way_out))

    def _forward_backward(self, cut: Parts, weights: StepWeights, logs: BatchLogs) -> list[Any]:
        """Add up the gradients of the micro-batches, and return their outputs."""
        trainer, strategy, parts = self.trainer, self.trainer.strategy, cut.parts
        outputs: list[Any] = []
        missing: list[int] = []
        if len(parts) > 1 or accumulation_continues(trainer) or self.sums.is_open:
            self.sums.begin(parameters_of(self.optimizer))

        def run(part: object, i: int) -> Tensor | None:
            logs.part = i
            output = call_strategy(trainer, "training_step", part, *self.rest)
            if output is None:
                _refuse_none(trainer.world_size)
                missing.append(i)
                if weights.held:
                    self._skip_as_unsplit(cut, weights, i, weights.held[0])
                return None
            if missing and not weights.held:
                self._skip_as_unsplit(cut, weights, missing[0], i)
            outputs.append(apply_to_collection(output, Tensor, torch.Tensor.detach))
            logs.note_output(output)
            loss = loss_of(output)
            if weights.split.is_sum:
                logs.note_sum(loss)
            return loss

        def backward(loss: Tensor) -> None:
            if self.window is None and trainer.accumulate_grad_batches > 1:
                # Lightning's ClosureResult divides the loss of a whole batch by the same number.
                loss = loss / trainer.accumulate_grad_batches
            call_strategy(trainer, "backward", loss, self.optimizer)

        replay = None
        if self.graphs is not None and len(parts) > 1:
            replay = self.graphs.replay_of(weights, logs, outputs, self.rest, self.optimizer, backward)
        # Other strategies have no ranks to wait for.
        no_sync = strategy.block_backward_sync if isinstance(strategy, ParallelStrategy) else nullcontext
        add_gradients(
            parts,
            weights,
            run,
            backward,
            gradients=None if self.window or weights.known else StepGradients(trainer.lightning_module.parameters()),
            sums=self.sums,
            no_sync=no_sync,
            # The last backward of this batch averages gradients over ranks.
            is_shared=trainer.world_size > 1 and not accumulation_continues(trainer),
            replay=replay,
        )
        return outputs

    def _skip_as_unsplit(self, cut: Parts, weights: StepWeights, missing: int, other: int) -> None:
        """Raises: _SkippedBatch: the step returns None, too, for a micro-batch without a loss and a row of another."""
        known, rows = weights.known, [*cut.rows_of(missing), cut.rows_of(other)[0]]
        is_counted = known is not None and not weights.split.is_sum and known.counts[missing] > 0
        if is_counted or self.search.skips(self.batch, rows, self.rest):
            raise _SkippedBatch(bool(weights.held))


def _refuse_none(world_size: int) -> None:
    if world_size > 1:
        why = "the other ranks would wait for this rank's gradients until a timeout"
        way_out = "Return a loss of zero that depends on the parameters, such as 0 * output.sum()"
        raise RuntimeError(explain("training_step returned None", why, way_out))
