"""How this room takes part in Lightning's automatic optimisation: the closure of one batch, run a part at a time.

Lightning runs ``training_step`` → ``zero_grad`` → ``backward``, once a batch, so gradients made inside
``training_step`` would be wiped. Here the closure of a batch is ``zero_grad`` → (``training_step`` → ``backward``) × n,
through the strategy's own methods, so that autocast, loss scaling, forward redirection and profiling stay Lightning's.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
    zero_grad_of_batch,
)
from lightning_fasttrain._messages import explain
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain.data._part_logs import PartLogs
from lightning_fasttrain.data._part_weights import Number, PartWeights, add_counts
from lightning_fasttrain.data.count_targets import Count, CountRule, CountTargets, count_targets, is_sum, weights_of
from lightning_fasttrain.data.fitting._alone_then_together import CollectivesWatch, Together
from lightning_fasttrain.data.fitting.further_savings import FurtherSavings
from lightning_fasttrain.data.fitting.split_until_it_fits import split_until_it_fits
from lightning_fasttrain.data.split_batch import batch_size, split_batch
from lightning_fasttrain.data.trial._split_trial import Sample, Stage, first_part, some_rows
from lightning_fasttrain.data.trial._step_parts import loss_of
from lightning_fasttrain.data.trial.find_count import find_on, is_sharded

_MANY = 2**16  # parts to give up at, where a user's own split function knows the number of samples


class Counting(Protocol):
    """What both kinds of technique say about weighing, and are told."""

    count: Count
    check: bool
    found: CountTargets | None
    found_before: CountRule | None


class Splitter(Counting, Protocol):
    """One that runs a batch in parts."""

    n: int
    adaptive: bool
    parts: int
    split: Callable[[Any, int], list[Any]]
    savings: FurtherSavings
    together: Together


class Window(Counting, Protocol):
    """One that sums the gradients of several batches."""

    reference: Any

    @property
    def holds_one_batch(self) -> bool: ...

    def take_reference(self, trainer: L.Trainer, batch: Any, count: CountTargets) -> None: ...

    def add(self, targets: Number, optimizer: Optimizer) -> None: ...


@dataclass(frozen=True)
class _Parts:
    """What running a batch in parts gave.

    Attributes:
        weights: of the parts.
        outputs: of ``training_step``, one a part.
        output: what the unsplit step would have returned.
        pass_on_logs: logs what the parts logged, once.
    """

    weights: PartWeights
    outputs: list[Any]
    output: Any
    pass_on_logs: Callable[[], None]


class BatchClosures:
    """Makes the closures of Lightning's automatic optimization while a run uses our accumulation."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.micro: Splitter | None = None
        self.window: Window | None = None
        self.logs = PartLogs()
        self.counted: CountTargets | None = None  # what the first batch showed
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
            if closures.micro is None and closures.window is None:
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
        if self.counted is None:
            self.counted = self._find_count(batch, rest)
            for technique in self._techniques:
                technique.found = self.counted
        if self.window is not None:
            self.window.take_reference(self.trainer, batch, self.counted or count_targets)
        if self.micro is None:
            return self._finish(self._run_parts([batch], rest, optimizer), optimizer)
        if self.micro.adaptive:
            return self._finish(self._run_until_it_fits(self.micro, batch, rest, optimizer), optimizer)
        parts = self.micro.split(batch, self.micro.n)
        self.micro.parts = len(parts)
        return self._finish(self._run_parts(parts, rest, optimizer), optimizer)

    def _run_until_it_fits(self, micro: Splitter, batch: Any, rest: list[Any], optimizer: Optimizer) -> "_Parts":
        most = batch_size(batch) if micro.split is split_batch else _MANY

        def attempt(n: int) -> _Parts:
            return self._run_parts(micro.split(batch, n), rest, optimizer)

        def run_one() -> _Parts:
            return self._run_parts(micro.split(batch, most)[:1], rest, optimizer)

        module, together = self.trainer.lightning_module, micro.together
        left = functools.partial(micro.savings.list_left, module)
        with together.run_alone():
            together.rehearse(run_one, left)
            tried, agree = together.wrap(attempt), together.agree
            parts, micro.n = split_until_it_fits(tried, module, micro.n, most, then=left(), agree=agree)
        together.join()
        return parts

    def _find_count(self, batch: Any, rest: list[Any]) -> CountTargets | None:
        """By what parts are weighed, found on this batch; None where it is one part of one sample, and weighs 1."""
        split, n = (self.micro.split, self.micro.n) if self.micro is not None else (split_batch, 1)
        if split is not split_batch:
            return self._find_on(rest, first_part(batch, n, split))
        if self.micro is None and not _can_be_cut(batch):
            # Nothing can be compared, but the losses that the step computes may tell the rule.
            return self._find_on(rest, iter([Sample(batch, 1, [])]))
        size = batch_size(batch)
        if size < 2 and self.window is None and self.trainer.world_size == 1:  # else the other ranks would wait
            return None
        return self._find_on(rest, some_rows(batch, -(-size // n)))

    def _find_on(self, rest: list[Any], samples: Iterator[Sample]) -> CountTargets | None:
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        sharded = is_sharded(module)
        # Past the strategy where it can be: then nothing is synchronised, and no engine waits for a backward.
        training_step = strategy.training_step if sharded else module.training_step
        watch = CollectivesWatch()
        stage = Stage(
            watch.wrap(lambda rows: training_step(rows, *rest)),
            [module],
            strategy.precision_plugin.train_step_context,
            gradients=not sharded,
            may_skip=True,
        )
        technique = self._counting
        found = find_on(stage, samples, technique.count, check=technique.check, preferred=technique.found_before)
        if self.micro is not None and self.micro.adaptive and not sharded:  # there each forward communicates
            watch.refuse()
        return found

    @property
    def _counting(self) -> Counting:
        """The technique whose ``count`` is used: one that is given serves both."""
        given = [technique for technique in self._techniques if technique.count != "auto"]
        return (given or self._techniques)[0]

    @property
    def _techniques(self) -> list[Counting]:
        return [technique for technique in (self.micro, self.window) if technique is not None]

    def _run_parts(self, parts: list[Any], rest: list[Any], optimizer: Optimizer) -> "_Parts":
        counts, total = weights_of(self.counted or count_targets, parts)
        means = counts
        if is_sum(self.counted):
            means = [batch_size(part) for part in parts]
        weights = PartWeights(counts, total)
        with self.logs.of_parts(self.trainer.lightning_module, means) as pass_on_logs:
            outputs = self._forward_backward(parts, rest, weights, optimizer)
        return _Parts(weights, outputs, _combine(outputs, weights, means), pass_on_logs)

    def _finish(self, parts: "_Parts", optimizer: Optimizer) -> ClosureResult:
        """What may wait for other ranks, and is done once, when all parts have fitted."""
        parts.pass_on_logs()
        weights = parts.weights
        self._forget_missing(parts.outputs, list(weights.counts), weights.total, optimizer)
        if self.window is not None:
            pairs = zip(weights.counts, parts.outputs, strict=True)
            self.window.add(add_counts([count for count, output in pairs if output is not None]), optimizer)
        return ClosureResult.from_training_step_output(parts.output, self.trainer.accumulate_grad_batches)

    def _forward_backward(
        self, parts: list[Any], rest: list[Any], weights: PartWeights, optimizer: Optimizer
    ) -> list[Any]:
        trainer, strategy = self.trainer, self.trainer.strategy
        outputs: list[Any] = []
        if self.window is not None:
            # The window's total is not known yet: a constant stands for it, and is taken out when the window is full.
            weights = PartWeights(weights.counts, self.window.reference)
        for i, part in enumerate(parts):
            # block_backward_sync is a method of these strategies only: others have no ranks to wait for.
            inner = i < len(parts) - 1 and isinstance(strategy, ParallelStrategy)
            with strategy.block_backward_sync() if inner else nullcontext():
                self.logs.part = i
                output = call_strategy(trainer, "training_step", part, *rest)
                if output is None:
                    self._refuse_none()
                    outputs.append(None)
                    continue
                loss = loss_of(output)
                if is_sum(self.counted):
                    self.logs.note_sum(loss)
                outputs.append(_detach(output))
                weighed = weights.weigh(loss, i)
                if self.window is None and trainer.accumulate_grad_batches > 1:
                    # As Lightning's ClosureResult does with the loss of a whole batch.
                    weighed = weighed / trainer.accumulate_grad_batches
                call_strategy(trainer, "backward", weighed, optimizer)
                del output, loss, weighed  # their graph must be gone before the next part is run
        return outputs

    def _refuse_none(self) -> None:
        if self.trainer.world_size > 1:
            why = "the other ranks would wait for this rank's gradients for ever"
            way_out = "Return a loss of zero that depends on the parameters, such as 0 * output.sum()"
            raise RuntimeError(explain("training_step returned None", why, way_out))

    def _forget_missing(self, outputs: list[Any], counts: list[Number], total: Number, optimizer: Optimizer) -> None:
        """A part whose step returned None was counted in ``total``: give its weight to the others."""
        if self.window is not None or is_sum(self.counted) or all(output is not None for output in outputs):
            return
        held = sum(c for c, output in zip(counts, outputs, strict=True) if output is not None)
        if float(held) in (0.0, float(total)):  # waits for the device, in a case that is rare
            return
        if self.trainer.accumulate_grad_batches > 1:
            what = "training_step returned None for one micro-batch inside an accumulation window"
            why = "the parts before it were already weighed as if it counted, and are summed with other batches"
            raise RuntimeError(explain(what, why, "Use TokenWeightedAccumulation, or return a loss of zero"))
        scale_gradients_(optimizer, total, held, self.trainer.strategy)


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
    if strategy is not None and own is not None:
        own(_ratio(numerator, denominator, strategy.root_device, torch.float32))
        return sum(len(group["params"]) for group in optimizer.param_groups)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for device in {grad.device for grad in grads}:
        some = [grad for grad in grads if grad.device == device]
        dtype = torch.promote_types(some[0].dtype, torch.float32)
        # By a tensor: the host need not wait for counts that are on the device.
        torch._foreach_mul_(some, _ratio(numerator, denominator, device, dtype))
    return len(grads)


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


def _combine(outputs: list[Any], weights: PartWeights, means: Sequence[Number]) -> Any:
    """What the unsplit step would have returned: the loss, tensors with an axis joined, other means weighed."""
    held = [part for part, output in enumerate(outputs) if output is not None]
    if not held:
        return None
    outputs = [outputs[part] for part in held]
    loss = weights.select(held).add_up([loss_of(output) for output in outputs])
    if not isinstance(outputs[0], dict):
        return loss
    means = [means[part] for part in held]
    of_means = PartWeights(means, add_counts(means))
    extras: dict[str, Any] = {}
    for key, first in outputs[0].items():
        values = [output[key] for output in outputs]
        if isinstance(first, Tensor) and first.ndim > 0:
            extras[key] = torch.cat(values)
        elif isinstance(first, Tensor) and first.is_floating_point():
            extras[key] = of_means.add_up(values)
        else:
            extras[key] = values[-1]
    return {**extras, "loss": loss}
