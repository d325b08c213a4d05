"""The closure of Lightning's automatic optimization that runs one batch in micro-batches.

Lightning runs ``training_step`` → ``zero_grad`` → ``backward`` once a batch, so gradients made inside ``training_step``
would be erased. Here the closure of a batch is ``zero_grad`` → (``training_step`` → ``backward``) × n, through the
strategy's own methods, so that autocast, loss scaling, forward redirection and profiling work as usual.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.core.host.lightning import (
    accumulation_continues,
    call_strategy,
    plain_closure,
    replace_closures,
    replaced_closures,
    zero_grad_of_batch,
)
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.data.closure.micro_batch_logging import LogCall, LogWeights, PartLogs
from lightning_fasttrain.data.closure.roles import Splitter, Window
from lightning_fasttrain.data.closure.split_search import SplitSearch
from lightning_fasttrain.data.normalizer.count_targets import count_targets
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.step_weights import StepWeights
from lightning_fasttrain.data.normalizer.trial.runs import own_divisor
from lightning_fasttrain.data.normalizer.trial.step_function import loss_of
from lightning_fasttrain.data.out_of_memory.retry_with_smaller_micro_batches import split_until_it_fits
from lightning_fasttrain.data.padding.trim_search import Parts, WholeParts
from lightning_fasttrain.data.split_batch import batch_size, split_batch
from lightning_fasttrain.data.step_gradients import (
    Float32GradientSums,
    StepGradients,
    add_gradients,
    list_parameters,
    ratio,
    scale_,
    takes_float32_gradients,
)
from lightning_fasttrain.data.trunk.batch_search import OUT_OF_TRIES, TRIES

_MANY = 2**16  # upper limit where only the user's split function knows the number of samples


@dataclass(frozen=True)
class _Result:
    """The result of running a batch in micro-batches.

    Attributes:
        weights: weights of the micro-batches.
        output: the output that the unsplit step would have returned.
        pass_on_logs: logs the values of all micro-batches, combined into one each.
    """

    weights: StepWeights
    output: Any
    pass_on_logs: Callable[[], None]


class BatchClosures:
    """Create the closures of Lightning's automatic optimization for a run that splits or sums batches."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.search = SplitSearch(trainer)
        self.logs = PartLogs()
        self._sums = Float32GradientSums()
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
            way_out = "Call accumulate_gradients(...) inside your training_step, with backward=self.manual_backward"
            raise ValueError(explain(f"{name} with automatic_optimization=False", why, way_out))
        if trainer.strategy is not None and trainer.strategy.handles_gradient_accumulation:
            why = "this strategy counts micro-batches itself and decides by its own count when to step"
            way_out = "Use accumulate_grad_batches with a smaller batch"
            raise ValueError(explain(f"{name} with {type(trainer.strategy).__name__}", why, way_out))
        # One closure serves both kinds of technique, since a second one would replace the first.
        joined = replaced_closures(trainer)
        closures = joined if isinstance(joined, cls) else cls(trainer)
        search = closures.search
        search.micro = micro or search.micro
        search.window = window or search.window

        def leave() -> None:
            search.micro = None if micro is not None else search.micro
            search.window = None if window is not None else search.window
            if micro is not None:
                search.leave_trunk()
            if search.micro is None and search.window is None:
                closures._sums.finish()
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
        self.search.look_at(batch, rest)
        for attempt in range(TRIES):
            try:
                return self._run_batch(batch, rest, optimizer)
            except OtherSplitError as error:
                self.search.find_another(batch, rest, error, attempt, is_first=zero_grad is not None)
                if zero_grad is not None:
                    zero_grad()
        raise CannotSplitError(OUT_OF_TRIES)

    def _run_batch(self, batch: Any, rest: list[Any], optimizer: Optimizer) -> ClosureResult:
        if self.search.window is not None:
            self.search.window.take_reference(self.trainer, self.search.size_of(batch))
        if self.search.micro is None:
            return self._finish(self._run_parts(batch, WholeParts([batch]), rest, optimizer), optimizer)
        if self.search.micro.adaptive:
            return self._finish(self._run_until_it_fits(self.search.micro, batch, rest, optimizer), optimizer)
        return self._finish(self._run_in(self.search.micro, self.search.micro.n, batch, rest, optimizer), optimizer)

    def _run_in(self, micro: Splitter, n: int, batch: Any, rest: list[Any], optimizer: Optimizer) -> "_Result":
        """Run a batch in ``n`` micro-batches: the whole step for each, or the trunk alone."""
        if self.search.trunk is None:
            cut = micro.trimming.cut(batch, n, micro.split, in_lockstep=self.search.runs_in_lockstep)
            micro.parts = len(cut.parts)
            return self._run_parts(batch, cut, rest, optimizer)
        for forward in self.search.forwards:
            forward.n = n
        micro.parts = n
        return self._run_parts(batch, WholeParts([batch]), rest, optimizer)

    def _run_until_it_fits(self, micro: Splitter, batch: Any, rest: list[Any], optimizer: Optimizer) -> "_Result":
        most = batch_size(batch) if micro.split is split_batch else _MANY

        def attempt(n: int) -> _Result:
            return self._run_in(micro, n, batch, rest, optimizer)

        def run_one() -> _Result:
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

    def _run_parts(self, batch: Any, cut: Parts, rest: list[Any], optimizer: Optimizer) -> "_Result":
        reference, parts = None, cut.parts
        if self.search.window is not None:
            # The window's total is not known yet: a constant stands in, and is divided out when the window is full.
            reference = self.search.window.reference
        weights = StepWeights(self.search.split or LossSplit(None, count_targets), parts, reference)
        with self.logs.of_parts(self.trainer.lightning_module, parts, weights.split.log_rules) as logs:
            outputs, returned = self._forward_backward(parts, rest, weights, optimizer)
        means = weights.counts
        if weights.split.is_sum:
            means = [batch_size(parts[part]) for part in weights.held]
        weighting = LogWeights(parts, dict(zip(weights.held, means, strict=True)), weights.split.log_rules)
        if len(parts) > 1:
            weighting.rules = self.search.settle_logs(batch, cut, rest, weighting, {**logs.calls, **returned})
        output = _combine(outputs, cut, weights, weighting, returned)
        return _Result(weights, output, functools.partial(logs.pass_on, weighting))

    def _finish(self, parts: "_Result", optimizer: Optimizer) -> ClosureResult:
        """Do the work that may wait for other ranks, once all micro-batches have fitted."""
        parts.pass_on_logs()
        if self.search.window is not None:
            self.search.window.add(parts.weights.total, optimizer)
        if not (accumulation_continues(self.trainer) or takes_float32_gradients(optimizer)):
            self._sums.finish()
        return ClosureResult.from_training_step_output(parts.output, self.trainer.accumulate_grad_batches)

    def _forward_backward(
        self, parts: list[Any], rest: list[Any], weights: StepWeights, optimizer: Optimizer
    ) -> tuple[list[Any], dict[str, list[LogCall]]]:
        """Return the outputs of the micro-batches, and the numbers among them by their names."""
        trainer, strategy = self.trainer, self.trainer.strategy
        outputs: list[Any] = []
        returned: dict[str, list[LogCall]] = {}
        if len(parts) > 1 or accumulation_continues(trainer) or self._sums.is_open:
            self._sums.begin(list_parameters(optimizer))

        def run(part: Any, i: int) -> Tensor | None:
            self.logs.part = i
            output = call_strategy(trainer, "training_step", part, *rest)
            if output is None:
                self._refuse_none()
                return None
            outputs.append(_detach(output))
            _note_returned(returned, i, output)
            loss = loss_of(output)
            if weights.split.is_sum:
                self.logs.note_sum(loss)
            return loss

        def backward(loss: Tensor) -> None:
            if self.search.window is None and trainer.accumulate_grad_batches > 1:
                # Lightning's ClosureResult divides the loss of a whole batch by the same number.
                loss = loss / trainer.accumulate_grad_batches
            call_strategy(trainer, "backward", loss, optimizer)

        scaled_here = weights.known is None and self.search.window is None
        # Other strategies have no ranks to wait for.
        no_sync = strategy.block_backward_sync if isinstance(strategy, ParallelStrategy) else nullcontext
        add_gradients(
            parts,
            weights,
            run,
            backward,
            gradients=StepGradients(trainer.lightning_module.parameters()) if scaled_here else None,
            sums=self._sums,
            no_sync=no_sync,
            # The last backward of this batch averages gradients over ranks.
            is_shared=trainer.world_size > 1 and not accumulation_continues(trainer),
        )
        if not scaled_here:
            self._forget_missing(weights, len(parts), optimizer)
        return outputs, returned

    def _refuse_none(self) -> None:
        if self.trainer.world_size > 1:
            why = "the other ranks would wait for this rank's gradients until a timeout"
            way_out = "Return a loss of zero that depends on the parameters, such as 0 * output.sum()"
            raise RuntimeError(explain("training_step returned None", why, way_out))

    def _forget_missing(self, weights: StepWeights, parts: int, optimizer: Optimizer) -> None:
        """Give the weight of a micro-batch whose step returned None to the others."""
        held = weights.held
        if len(held) == parts or not held or self.search.window is not None or weights.split.is_sum:
            return
        assert weights.known is not None
        counted, total = weights.total, weights.known.total
        if float(counted) in (0.0, float(total)):  # rarely reached; it waits for the device
            return
        if self.trainer.accumulate_grad_batches > 1:
            what = "training_step returned None for one micro-batch inside an accumulation window"
            why = "earlier micro-batches were already weighted as if it counted, and are summed with other batches"
            raise RuntimeError(explain(what, why, "Use TokenWeightedAccumulation, or return a loss of zero"))
        scale_(list_parameters(optimizer), ratio(total, counted, self.trainer.strategy.root_device, torch.float32))


def _detach(output: Any) -> Any:
    return apply_to_collection(output, Tensor, torch.Tensor.detach)


def _note_returned(returned: dict[str, list[LogCall]], part: int, output: Any) -> None:
    """Note the numbers that a micro-batch returned beside the loss, in the form of logged values."""
    for key, value in output.items() if isinstance(output, dict) else ():
        if key != "loss" and _is_number(value):
            own = own_divisor(value) if isinstance(value, Tensor) else None
            returned.setdefault(f"return {key}", []).append(LogCall(part, _detach(value), {}, own))


def _combine(
    outputs: list[Any],
    cut: Parts,
    weights: StepWeights,
    weighting: LogWeights,
    returned: Mapping[str, list[LogCall]],
) -> Any:
    """Return the unsplit step's output: the loss, tensors joined along their first axis, other values as if logged."""
    if not outputs:
        return None
    loss = weights.loss()
    if not isinstance(outputs[0], dict):
        return loss
    extras: dict[str, Any] = {}
    for key, first in outputs[0].items():
        values = [output[key] for output in outputs]
        name = f"return {key}"
        if key == "loss":
            continue
        if isinstance(first, Tensor) and first.ndim > 0:
            extras[key] = cut.join(values, weights.held)
        elif name in returned:
            extras[key] = weighting.combine(name, returned[name])
        else:
            extras[key] = values[-1]
    return {**extras, "loss": loss}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
