"""How this room takes part in Lightning's automatic optimisation: the closure of one batch, run a part at a time.

Lightning runs ``training_step`` → ``zero_grad`` → ``backward``, once a batch, so gradients made inside
``training_step`` would be wiped. Here the closure of a batch is ``zero_grad`` → (``training_step`` → ``backward``) × n,
through the strategy's own methods, so that autocast, loss scaling, forward redirection and profiling stay Lightning's.
"""

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain._host import (
    call_strategy,
    plain_closure,
    replace_closures,
    replaced_closures,
    step_goes_on,
    zero_grad_of_batch,
)
from lightning_fasttrain._messages import explain, say
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain.data.fitting._alone_then_together import CollectivesWatch, Together
from lightning_fasttrain.data.fitting.further_savings import FurtherSavings
from lightning_fasttrain.data.fitting.split_until_it_fits import split_until_it_fits
from lightning_fasttrain.data.float32_gradient_sums import Float32GradientSums, takes_float32_gradients
from lightning_fasttrain.data.micro_batch_logging import LogWeights, PartLogs
from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule, count_targets
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError, find_split, from_all_ranks, is_sharded
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import DeferredCheck, LossSplit, OtherSplitError, StepWeights
from lightning_fasttrain.data.normalizer.step_gradients import StepGradients, scale_
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample, first_micro_batch, sample_rows
from lightning_fasttrain.data.normalizer.trial.step_function import loss_of
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, try_split
from lightning_fasttrain.data.split_batch import batch_size, split_batch
from lightning_fasttrain.data.trunk.find_trunk import Through, Trunk, find_trunk, name_trunk
from lightning_fasttrain.data.trunk.micro_batch_forward import MicroBatchedForward

_TRIES = 4  # what was found, what this batch shows, that without the counting rule, and the trunk
_MANY = 2**16  # parts to give up at, where a user's own split function knows the number of samples


class Counting(Protocol):
    """What both kinds of technique say about weighing, and are told."""

    count: Count
    check: bool
    found: LossSplit | None
    found_before: CountRule | None


class Splitter(Counting, Protocol):
    """One that runs a batch in parts."""

    n: int
    adaptive: bool
    parts: int
    split: Callable[[Any, int], list[Any]]
    savings: FurtherSavings
    together: Together
    through: Through | None


class Window(Counting, Protocol):
    """One that sums the gradients of several batches."""

    reference: Any

    @property
    def holds_one_batch(self) -> bool: ...

    def take_reference(self, trainer: L.Trainer, size: Number) -> None: ...

    def add(self, targets: Number, optimizer: Optimizer) -> None: ...


@dataclass(frozen=True)
class _Parts:
    """What running a batch in parts gave.

    Attributes:
        weights: of the parts.
        output: what the unsplit step would have returned.
        pass_on_logs: logs what the parts logged, once.
    """

    weights: StepWeights
    output: Any
    pass_on_logs: Callable[[], None]


class BatchClosures:
    """Makes the closures of Lightning's automatic optimization while a run uses our accumulation."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.micro: Splitter | None = None
        self.window: Window | None = None
        self.logs = PartLogs()
        self.split: LossSplit | None = None  # what the first batch showed
        self.trunk: Trunk | None = None  # what runs in micro-batches where the loss cannot be split
        self._trunk_forwards: list[MicroBatchedForward] = []
        self._undo_trunk: Undo = _do_nothing
        self._sums = Float32GradientSums()
        self._batches = 0
        self._began, self._looked = time.monotonic(), 0.0  # seconds that looking at samples has taken
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
        """Take part in this trainer's closures; the returned function leaves them again."""
        name = type(micro or window).__name__
        if not pl_module.automatic_optimization:
            why = "the module runs backward itself, so there is no step to split"
            way_out = "Call accumulate_gradients(...) inside your training_step, with backward=self.manual_backward"
            raise ValueError(explain(f"{name} with automatic_optimization=False", why, way_out))
        if trainer.strategy is not None and trainer.strategy.handles_gradient_accumulation:
            why = "this strategy counts micro-batches itself and steps on its own count"
            way_out = "Use accumulate_grad_batches with a smaller batch"
            raise ValueError(explain(f"{name} with {type(trainer.strategy).__name__}", why, way_out))
        # One closure serves both kinds of technique: a second would replace the first.
        joined = replaced_closures(trainer)
        closures = joined if isinstance(joined, cls) else cls(trainer)
        closures.micro = micro or closures.micro
        closures.window = window or closures.window

        def leave() -> None:
            closures.micro = None if micro is not None else closures.micro
            closures.window = None if window is not None else closures.window
            if micro is not None:
                closures.leave_trunk()
            if closures.micro is None and closures.window is None:
                closures._sums.finish()
                closures._restore()

        return leave

    def __call__(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        if self._is_plain():
            return plain_closure(self.trainer, kwargs, optimizer, batch_idx)
        zero_grad = zero_grad_of_batch(self.trainer, batch_idx, optimizer)
        return Closure(step_fn=lambda: self._run(kwargs, optimizer, zero_grad))

    def _is_plain(self) -> bool:
        """One part in a window of one batch weighs 1 whatever it counts: then Lightning's own closure does the same."""
        one_part = self.micro is None or (self.micro.n == 1 and not self.micro.adaptive)
        return one_part and (self.window is None or self.window.holds_one_batch)

    def _run(
        self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, zero_grad: Callable[[], None] | None
    ) -> ClosureResult:
        if zero_grad is not None:
            zero_grad()
        if "any" in kwargs:  # what Lightning calls the iterator that it hands to such a step
            why = "the module fetches its batches itself, so there is none to split"
            raise TypeError(explain("training_step(self, dataloader_iter)", why, "Take `batch` in training_step"))
        batch, *rest = kwargs.values()
        self._batches += 1
        if self.split is None or self.split.provisional or self._is_time_to_look_again():
            self._find_split(batch, rest)
        for attempt in range(_TRIES):
            try:
                return self._run_batch(batch, rest, optimizer)
            except OtherSplitError as error:
                self._find_another(batch, rest, error, attempt, is_first=zero_grad is not None)
                if zero_grad is not None:
                    zero_grad()
        raise CannotSplitError("its micro-batches are divided by other numbers than was found out on this very batch")

    def _run_batch(self, batch: Any, rest: list[Any], optimizer: Optimizer) -> ClosureResult:
        if self.window is not None:
            self.window.take_reference(self.trainer, self._size_of(batch))
        if self.micro is None:
            return self._finish(self._run_parts([batch], rest, optimizer), optimizer)
        if self.micro.adaptive:
            return self._finish(self._run_until_it_fits(self.micro, batch, rest, optimizer), optimizer)
        return self._finish(self._run_in(self.micro, self.micro.n, batch, rest, optimizer), optimizer)

    def _run_in(self, micro: Splitter, n: int, batch: Any, rest: list[Any], optimizer: Optimizer) -> "_Parts":
        """Run a batch in ``n`` micro-batches: the whole step of each, or the trunk alone."""
        if self.trunk is None:
            parts = micro.split(batch, n)
            micro.parts = len(parts)
            return self._run_parts(parts, rest, optimizer)
        for forward in self._trunk_forwards:
            forward.n = n
        micro.parts = n
        return self._run_parts([batch], rest, optimizer)

    def _is_time_to_look_again(self) -> bool:
        """Batches 2, 4, 8, ... may show what the first has not, if looking takes under 1% of the time so far."""
        if self._batches & (self._batches - 1) or self.micro is None or self.trunk is not None:
            return False
        reads = self.split is not None and self.split.read is not None
        so_far = time.monotonic() - self._began
        return reads and self._counting.check and self.trainer.world_size == 1 and self._looked < 0.01 * so_far

    def _size_of(self, batch: Any) -> Number:
        """About what the loss of a batch is divided by."""
        split = self.split or LossSplit(None, count_targets)
        if split.is_sum:
            return 1
        if split.count is not None:
            return split.count(batch)
        return split.per_sample * (batch_size(batch) if _can_be_cut(batch) else 1)

    def _find_split(self, batch: Any, rest: list[Any], together: bool = True) -> None:
        through = None if self.micro is None else self.micro.through
        if through is not None and self.trunk is None:
            self._enter_trunk(name_trunk([self.trainer.lightning_module], through), "as through= says")
        if self.trunk is not None and self.window is None:
            self.split = LossSplit(None, CountRule("sum"))  # of a single part
        else:
            began = time.monotonic()
            try:
                self.split = self._try_batch(batch, rest, together)
            except CannotSplitError as error:
                self._use_trunk(error, rest, together)
            self._looked += time.monotonic() - began
        for technique in self._techniques:
            technique.found = self.split

    def _use_trunk(self, error: CannotSplitError, rest: list[Any], together: bool) -> None:
        """For a loss that cannot be split: run the submodules in which samples are independent in micro-batches."""
        if self.micro is None or self.window is not None or self._counting.count != "auto":
            raise error
        trunk: Trunk | str = "nothing could be tried"
        if error.trial is not None and error.trial.splits and error.trial.splits[0].parameters:
            trunk = find_trunk(self._stage(rest, CollectivesWatch()), error.trial)
        found = sorted(trunk.modules) if isinstance(trunk, Trunk) else trunk
        others = from_all_ranks([found]) if together else [found]
        unlike = next((other for other in others if other != found), found)
        if not isinstance(trunk, Trunk) or unlike != found:
            if error.otherwise is not None and not isinstance(unlike, str | list):
                self.split = error.otherwise
                return
            raise CannotSplitError(f"{error.why}, and {unlike}", error.trial, nearest=error.nearest) from None
        self._enter_trunk(trunk, f"since {error.why}")
        self.split = LossSplit(None, CountRule("sum"))

    def _enter_trunk(self, trunk: Trunk, why: str) -> None:
        self.trunk = trunk
        self._trunk_forwards, self._undo_trunk = trunk.install(1)
        say(
            "MicroBatching: %s runs in micro-batches with recomputation, which is one more forward, and the loss sees "
            "the whole batch, %s",
            trunk,
            why,
        )

    def leave_trunk(self) -> None:
        """At the end of the run."""
        self._undo_trunk()
        self.trunk, self._trunk_forwards, self._undo_trunk = None, [], _do_nothing

    def _find_another(self, batch: Any, rest: list[Any], error: OtherSplitError, attempt: int, is_first: bool) -> None:
        """For a batch whose loss is not split as those before it: none of its gradients has been used."""
        if not is_first:
            what = "MicroBatching inside an accumulation window"
            why = f"this batch is not split as those before it, whose gradients are in the sum: {error}"
            raise ValueError(
                explain(what, why, "Use TokenWeightedAccumulation, or name the trunk with through=")
            ) from error
        before = self.split
        assert before is not None
        if attempt == 0:
            self._find_split(batch, rest, together=False)
        if self.trunk is None and self.split == before:
            if before.count is not None and before.read is not None:
                self.split = replace(before, count=None)  # the rule does not count what is read: it is read alone
            else:
                trial = try_split(self._stage(rest, CollectivesWatch()), self._sample(batch))
                self._use_trunk(CannotSplitError(f"{error}", trial), rest, together=False)
        if self.trunk is None:
            say("MicroBatching: %s; from here on each micro-batch is weighted by %s", error, self.split)

    def _run_until_it_fits(self, micro: Splitter, batch: Any, rest: list[Any], optimizer: Optimizer) -> "_Parts":
        most = batch_size(batch) if micro.split is split_batch else _MANY

        def attempt(n: int) -> _Parts:
            return self._run_in(micro, n, batch, rest, optimizer)

        def run_one() -> _Parts:
            one = micro.split(batch, most)[0]
            return self._run_in(micro, 1, one, rest, optimizer)

        module, together = self.trainer.lightning_module, micro.together
        left = functools.partial(micro.savings.list_left, module)
        with together.run_alone():
            together.rehearse(run_one, left)
            tried, agree = together.wrap(attempt), together.agree
            parts, micro.n = split_until_it_fits(tried, module, micro.n, most, then=left(), agree=agree)
        together.join()
        return parts

    def _try_batch(self, batch: Any, rest: list[Any], together: bool) -> LossSplit | None:
        """How the loss of this batch is split; None where it is one part of one sample, and weighs 1."""
        if self.micro is None and not _can_be_cut(batch):
            # Nothing can be compared, but the losses that the step computes may tell the rule.
            return self._find_on(rest, iter([Sample(batch, 1, [])]), together)
        is_one = self.micro is None or self.micro.split is split_batch
        if is_one and batch_size(batch) < 2 and self.window is None and self.trainer.world_size == 1:
            return None  # with several ranks the others would wait
        return self._find_on(rest, self._sample(batch), together)

    def _sample(self, batch: Any) -> Iterator[Sample]:
        """A few samples of a batch; where a user's own function splits it, its first micro-batch."""
        split, n = (self.micro.split, self.micro.n) if self.micro is not None else (split_batch, 1)
        if split is not split_batch:
            return first_micro_batch(batch, n, split)
        return sample_rows(batch, -(-batch_size(batch) // n))

    def _find_on(self, rest: list[Any], samples: Iterator[Sample], together: bool) -> LossSplit | None:
        watch = CollectivesWatch()
        stage = self._stage(rest, watch)
        technique = self._counting
        found = find_split(
            stage,
            samples,
            technique.count,
            check=technique.check,
            preferred=technique.found_before,
            together=together,
            whole_batches=self.micro is None,
        )
        if self.micro is not None and self.micro.adaptive and stage.gradients:  # there each forward communicates
            watch.refuse()
        if found is not None and found.count is None and not found.is_sum and not self._can_scale:
            why = f"{type(self.trainer.strategy).__name__} sums gradients over ranks before their total is known"
            raise CannotSplitError(f"{why}, and no rule counts {found} beforehand")
        return found

    @property
    def _can_scale(self) -> bool:
        """Whether gradients of this rank can be multiplied before they are synchronised."""
        return self.window is not None or own_scaling(self.trainer.strategy) is None

    def _stage(self, rest: list[Any], watch: CollectivesWatch) -> Stage:
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        sharded = is_sharded(module)
        # Past the strategy where it can be: then nothing is synchronised, and no engine waits for a backward.
        training_step = strategy.training_step if sharded else module.training_step
        return Stage(
            watch.wrap(lambda rows: training_step(rows, *rest)),
            [module],
            strategy.precision_plugin.train_step_context,
            gradients=not sharded,
            may_skip=True,
        )

    @property
    def _counting(self) -> Counting:
        """The technique whose ``count`` is used: one that is given serves both."""
        given = [technique for technique in self._techniques if technique.count != "auto"]
        return (given or self._techniques)[0]

    @property
    def _techniques(self) -> list[Counting]:
        return [technique for technique in (self.micro, self.window) if technique is not None]

    def _run_parts(self, parts: list[Any], rest: list[Any], optimizer: Optimizer) -> "_Parts":
        reference = None
        if self.window is not None:
            # The window's total is not known yet: a constant stands for it, and is taken out when the window is full.
            reference = self.window.reference
        weights = StepWeights(self.split or LossSplit(None, count_targets), parts, reference)
        with self.logs.of_parts(self.trainer.lightning_module, parts, weights.split.log_rules) as pass_on_logs:
            outputs = self._forward_backward(parts, rest, weights, optimizer)
        means = weights.counts
        if weights.split.is_sum:
            means = [batch_size(parts[part]) for part in weights.held]
        weighting = LogWeights(parts, dict(zip(weights.held, means, strict=True)), weights.split.log_rules)
        output = _combine(outputs, weights, weighting)
        return _Parts(weights, output, functools.partial(pass_on_logs, weights.held, means))

    def _finish(self, parts: "_Parts", optimizer: Optimizer) -> ClosureResult:
        """What may wait for other ranks, and is done once, when all parts have fitted."""
        parts.pass_on_logs()
        if self.window is not None:
            self.window.add(parts.weights.total, optimizer)
        if not (step_goes_on(self.trainer) or takes_float32_gradients(optimizer)):
            self._sums.finish()
        return ClosureResult.from_training_step_output(parts.output, self.trainer.accumulate_grad_batches)

    def _forward_backward(
        self, parts: list[Any], rest: list[Any], weights: StepWeights, optimizer: Optimizer
    ) -> list[Any]:
        trainer, strategy = self.trainer, self.trainer.strategy
        outputs: list[Any] = []
        if len(parts) > 1 or step_goes_on(trainer) or self._sums.is_open:
            self._sums.begin(_list_parameters(optimizer))
        scaled_here = weights.known is None and self.window is None
        gradients = StepGradients(trainer.lightning_module.parameters() if scaled_here else ())
        if scaled_here:
            gradients.set_aside()
        for i, part in enumerate(parts):
            # block_backward_sync is a method of these strategies only: others have no ranks to wait for.
            last = i == len(parts) - 1
            with strategy.block_backward_sync() if self._has_sync and not last else nullcontext():
                self.logs.part = i
                output = call_strategy(trainer, "training_step", part, *rest)
                if output is None:
                    self._refuse_none()
                    continue
                outputs.append(_detach(output))
                weighed = self._weigh(loss_of(output), weights, i)
                del output
                if not last:
                    call_strategy(trainer, "backward", weighed, optimizer)
                else:
                    check = DeferredCheck(weights.disagreement())
                    if scaled_here:
                        weighed = gradients.finish(weighed, weights.settle())
                    if self._reduces_gradients:
                        self._sums.finish()  # DDP's buckets have the parameters' own type
                    call_strategy(trainer, "backward", weighed, optimizer)
                    check.refuse()
                del weighed  # its graph must be gone before the next part is run
        if scaled_here:  # and the last part's step returned None
            gradients.close(weights.settle() if weights.held else None)
        else:
            self._forget_missing(weights, len(parts), optimizer)
        return outputs

    def _weigh(self, loss: Tensor, weights: StepWeights, part: int) -> Tensor:
        if weights.split.is_sum:
            self.logs.note_sum(loss)
        weighed = weights.weigh(loss, part)
        if self.window is None and self.trainer.accumulate_grad_batches > 1:
            # As Lightning's ClosureResult does with the loss of a whole batch.
            weighed = weighed / self.trainer.accumulate_grad_batches
        return weighed

    @property
    def _reduces_gradients(self) -> bool:
        """Whether the last backward of this batch averages gradients over ranks."""
        return self.trainer.world_size > 1 and not step_goes_on(self.trainer)

    @property
    def _has_sync(self) -> bool:
        return isinstance(self.trainer.strategy, ParallelStrategy)

    def _refuse_none(self) -> None:
        if self.trainer.world_size > 1:
            why = "the other ranks would wait for this rank's gradients for ever"
            way_out = "Return a loss of zero that depends on the parameters, such as 0 * output.sum()"
            raise RuntimeError(explain("training_step returned None", why, way_out))

    def _forget_missing(self, weights: StepWeights, parts: int, optimizer: Optimizer) -> None:
        """Where a part's step returned None: give its weight to the others."""
        held = weights.held
        if len(held) == parts or not held or self.window is not None or weights.split.is_sum:
            return
        assert weights.known is not None
        counted, total = weights.total, weights.known.total
        if float(counted) in (0.0, float(total)):  # waits for the device, in a case that is rare
            return
        if self.trainer.accumulate_grad_batches > 1:
            what = "training_step returned None for one micro-batch inside an accumulation window"
            why = "the parts before it were already weighed as if it counted, and are summed with other batches"
            raise RuntimeError(explain(what, why, "Use TokenWeightedAccumulation, or return a loss of zero"))
        scale_(_list_parameters(optimizer), _ratio(total, counted, self.trainer.strategy.root_device, torch.float32))


def _do_nothing() -> None:
    pass


def _can_be_cut(batch: Any) -> bool:
    try:
        return batch_size(batch) > 0
    except ValueError:
        return False


def scale_gradients_(
    optimizer: Optimizer, numerator: Number, denominator: Number, strategy: Strategy | None = None
) -> int:
    """Multiply every gradient by ``numerator / denominator`` (0 where the denominator is 0); returns how many.

    A strategy that keeps gradients where ``parameter.grad`` does not show them has a ``scale_gradients_`` of its own.
    """
    own = own_scaling(strategy)
    parameters = _list_parameters(optimizer)
    if strategy is not None and own is not None:
        own(_ratio(numerator, denominator, strategy.root_device, torch.float32))
        return len(parameters)
    device = strategy.root_device if strategy is not None else parameters[0].device
    return scale_(parameters, _ratio(numerator, denominator, device, torch.float64))


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_scaling(strategy: Strategy | None) -> Callable[[Tensor], None] | None:
    """How a strategy that holds the gradients itself, in pieces, multiplies those of the coming step; else None."""
    return getattr(strategy, "scale_gradients_", None)


def _ratio(numerator: Number, denominator: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    up, down = _as_tensor(numerator, device, dtype), _as_tensor(denominator, device, dtype)
    return torch.where(down > 0, up / down, torch.zeros((), dtype=dtype, device=device))


def _as_tensor(number: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def _detach(output: Any) -> Any:
    return apply_to_collection(output, Tensor, torch.Tensor.detach)


def _combine(outputs: list[Any], weights: StepWeights, weighting: LogWeights) -> Any:
    """What the unsplit step would have returned: the loss, tensors with an axis joined, other values as logged ones."""
    if not outputs:
        return None
    loss = weights.loss()
    if not isinstance(outputs[0], dict):
        return loss
    extras: dict[str, Any] = {}
    for key, first in outputs[0].items():
        values = [output[key] for output in outputs]
        if isinstance(first, Tensor) and first.ndim > 0:
            extras[key] = torch.cat(values)
        elif isinstance(first, Tensor) and first.is_floating_point():
            extras[key] = weighting.combine(f"return {key}", values, weights.held)
        else:
            extras[key] = values[-1]
    return {**extras, "loss": loss}
