"""Gradient accumulation over batches in which every target has the same weight, also in an incomplete last window."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.host.lightning import (
    decide_when_accumulation_continues,
    is_last_batch_taken,
    refuse_static_graph,
)
from lightning_fasttrain.core.host.loader_wrapper import look_ahead_in_streams
from lightning_fasttrain.core.host.optimizer_steps import unwrap_optimizer
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.micro_batching.micro_batch_closure import BatchClosures
from lightning_fasttrain.micro_batching.normalizer.count_targets import (
    Count,
    CountRule,
    named_count,
    rule_in,
    rule_state,
)
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit
from lightning_fasttrain.micro_batching.step_gradients import own_scaling, scale_gradients_
from lightning_fasttrain.technique import Capability, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep
from lightning_fasttrain.trial.read_normalizers import Number, scalar_on


class TokenWeightedAccumulation(Technique):
    """Sum gradients over ``factor`` batches so that the step equals that of their concatenation.

    Lightning divides every batch's mean loss by the factor, which is wrong when batches hold different numbers of
    targets and when the last window of an epoch is short. Here batch k contributes c_k ℓ_k, and once the window is
    full its gradient is divided by Σ c_k, over all ranks. ``training_step`` still returns its mean loss.

    c_k is read from the graph of each batch's own loss: the divisor of its mean or quotient. Samples of the first batch
    are run by themselves too, which shows constant factors, but they need not be able to: batches may be pairs, objects
    or lists of images, and a step may assert a size. A batch whose loss is zero for lack of targets counts nothing, and
    one whose loss is divided by 1 counts one target.

    Acts in the closure of the optimizer step; the division is done before any callback, clipping or the optimizer
    sees the gradient. A checkpoint taken inside a window holds the gradient so far.

    Args:
        factor: number of batches per window; or a schedule, ``{0: 1, 4: 8}``: from epoch (or optimizer step) 4 on, 8.
        by: the unit of a schedule's keys, ``"epoch"`` or ``"step"``. A new factor applies from the next window on.
        count: as for :class:`~lightning_fasttrain.MicroBatching`; one given there serves both.
        check: as for :class:`~lightning_fasttrain.MicroBatching`.

    Raises:
        TypeError, ValueError: a factor that is not an integer of at least 1, or a schedule without key 0; in ``fit``:
            accumulation is also configured elsewhere.

    Example:
        >>> schedule = TokenWeightedAccumulation({0: 1, 100: 4}, by="step")
        >>> schedule.factor_at(99), schedule.factor_at(100)
        (1, 4)

    Source:
        Like ``num_items_in_batch`` of Hugging Face transformers (pull request 34191), but without fetching the
        window's batches ahead of time.
    """

    keeps_draws: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.SUMS_BATCHES})
    effect: ClassVar[str] = "several batches per step, with the same weight for every target"
    when: ClassVar[str] = "accumulated batches hold different numbers of targets; not for a batch that fits"
    in_a_loop: ClassVar[str] = "accumulate_window(step, batches)"
    predicted: ClassVar[bool] = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"accumulate_grad_batches": "factor=", "gradient_accumulation_steps": "factor="}
    }

    def __init__(
        self,
        factor: int | Mapping[int, int],
        by: Literal["epoch", "step"] = "epoch",
        count: Count = "auto",
        check: bool = True,
    ) -> None:
        if not isinstance(factor, Mapping):
            factor = {0: factor}
        schedule = dict(factor)
        if 0 not in schedule:
            raise ValueError(explain(f"factor={schedule}", "the schedule has no first factor", "Add a key 0"))
        for start, value in schedule.items():
            if not isinstance(start, int) or start < 0:
                raise ValueError(explain(f"factor={schedule}", f"{start!r} is not a valid {by}", "Use integers from 0"))
            positive_int("factor", value)
        self.schedule = dict(sorted(schedule.items()))
        self.by = one_of("by", by, ("epoch", "step"))
        self.count: Count = named_count(count)
        self.check = check
        self.found: LossSplit | None = None
        self.found_before: CountRule | None = None
        self.reference: Any = None  # scales summed losses near their mean, for float16; cancels out
        self._trainer: L.Trainer | None = None
        self._restored: dict[str, Any] | None = None
        self._factor = self._world_size = 1
        self._asked_for = -1  # the batch of the cached answer below
        self._continues = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._batches = 0
        self._targets: Number = 0
        self._uncounted = False  # whether batches whose samples showed no targets have a gradient

    def factor_at(self, when: int) -> int:
        """Return the factor at an epoch or optimizer step, depending on the schedule's unit."""
        return [factor for start, factor in self.schedule.items() if start <= when][-1]

    def factor_in(self, epoch: int, step: int) -> int:
        """Return the factor of a window that begins in an epoch, at an optimizer step."""
        return self.factor_at(epoch if self.by == "epoch" else step)

    def count_windows(self, batches: int, epoch: int, before: int) -> int:
        """Return the number of windows of an epoch, each an optimizer step; the last may be short.

        Args:
            batches: number of batches in the epoch.
            epoch: the epoch's index.
            before: number of optimizer steps before it.

        Example:
            >>> TokenWeightedAccumulation({0: 1, 3: 4}, by="step").count_windows(12, epoch=0, before=0)
            6
        """
        windows = 0
        while batches > 0:
            if self._stays_from(before + windows):
                return windows + math.ceil(batches / self.factor_in(epoch, before + windows))
            batches -= self.factor_in(epoch, before + windows)
            windows += 1
        return windows

    def _stays_from(self, step: int) -> bool:
        """Whether the factor is constant from this step to the end of an epoch."""
        return self.by == "epoch" or step >= max(self.schedule)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.accumulates == 1 and facts.devices == 1:
            return "a step is one batch on one device, whose targets already have the same weight"
        return None

    def describe_effect(self, model: nn.Module) -> str:
        factors = sorted(set(self.schedule.values()))
        return f"every target of {' or '.join(map(str, factors))} batches has the same weight in a step"

    def predict(self, step: PredictedStep) -> None:
        step.window = max(self.schedule.values())

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        others = [type(c).__name__ for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
        if trainer.accumulate_grad_batches != 1:
            others.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches}")
        if others:
            what = f"{type(self).__name__} with {others[0]}"
            raise ValueError(explain(what, "both would decide when to step", "Remove the other one"))
        self._trainer = trainer
        self._world_size = trainer.world_size
        self._asked_for = -1
        self._begin_window()
        leave = BatchClosures.join(trainer, pl_module, window=self)
        restore = decide_when_accumulation_continues(trainer, self._window_continues)
        zero_grad = pl_module.optimizer_zero_grad

        def optimizer_zero_grad(epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
            if self._batches == 0:  # Lightning counts windows by batch_idx, unlike a schedule by step
                zero_grad(epoch, batch_idx, optimizer)

        restore_zero_grad = patch(pl_module, "optimizer_zero_grad", optimizer_zero_grad)
        restore_reading = look_ahead_in_streams(trainer)  # the last window of a stream is stepped, be it short
        factor = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self._factor_now()  # so that estimated_stepping_batches is right

        def undo() -> None:
            trainer.accumulate_grad_batches = factor
            restore_reading()
            restore_zero_grad()
            restore()
            leave()
            self._trainer = None

        return undo

    def _factor_now(self) -> int:
        assert self._trainer is not None
        return self.factor_in(self._trainer.current_epoch, self._trainer.fit_loop.epoch_loop.global_step)

    def _window_continues(self) -> bool:
        """Whether the window continues after this batch; Lightning asks before, during and after its step."""
        assert self._trainer is not None
        loop = self._trainer.fit_loop.epoch_loop
        batch = loop.batch_progress.total.ready
        # One answer per batch: `add` runs between two of these questions and changes the state that determines it.
        if batch != self._asked_for:
            self._asked_for = batch
            if self._batches == 0:
                self._factor = self._trainer.accumulate_grad_batches = self._factor_now()
            self._continues = self._batches + 1 < self._factor and not is_last_batch_taken(self._trainer)
        return self._continues

    @property
    def holds_one_batch(self) -> bool:
        """Whether windows are one batch on one rank, so that its weight cancels."""
        return not self._window_continues() and self._factor == self._world_size == 1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first one at which the strategy has wrapped the model."""
        refuse_static_graph(trainer, type(self).__name__)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: called before the batch is run; a window begins without gradients."""
        # Lightning zeroes at multiples of the factor, counted from the start of the epoch; windows may begin elsewhere.
        if not self.holds_one_batch and self._batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def take_reference(self, trainer: L.Trainer, size: Number) -> None:
        """Set the scale of summed losses; called by the closure before each batch, effective for the first of a run."""
        if self.reference is None:
            here = scalar_on(trainer.strategy.root_device, size, torch.float32)
            mean = float(trainer.strategy.reduce(here, reduce_op="mean"))  # synchronizes the device, once a run
            # The first batch may have no targets, and it is a divisor.
            if not mean > 0:
                mean = 1.0
            self.reference = mean

    def add(self, targets: Number, optimizer: Optimizer) -> None:
        """Count a batch after it was run, and finish the gradient if the window is full; called by the closure."""
        assert self._trainer is not None
        self._targets = self._targets + targets
        self._batches += 1
        self._refuse_uncounted(optimizer)
        if self._window_continues():
            return
        if self.found is not None and self.found.is_sum:
            self._targets = 1 / self._trainer.world_size  # turns the mean over ranks into a sum
        elif self._trainer.world_size > 1:  # DDP averages gradients, so the mean count divides
            strategy = self._trainer.strategy
            precision = torch.float64 if strategy.root_device.type == "cpu" else torch.float32
            targets = scalar_on(strategy.root_device, self._targets, precision)
            self._targets = strategy.reduce(targets, reduce_op="mean")
        scale_gradients_(optimizer, self.reference, self._targets, self._trainer.strategy)
        self._begin_window()

    def _refuse_uncounted(self, optimizer: Optimizer) -> None:
        """Raises: CannotSplitError: a batch without targets in the tried samples has a gradient, at an unknown weight.

        It has none where the batch has no targets, and the right one where losses turn out to be sums.
        """
        if self.found is None or (self.found.is_sum and not self.found.counts_nothing):
            return
        if self.found.counts_nothing:
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            self._uncounted = any(bool(gradient.any()) for gradient in gradients)  # seldom reached; waits for a device
        elif self._uncounted:
            why = "the first batches of the window have targets, but not in the samples that were tried"
            raise CannotSplitError(why)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: save the gradient so far inside a window (averaged over ranks, as DDP will do)."""

        def mean(value: Number) -> Tensor:
            # A copy, since Lightning reduces in place.
            value = torch.as_tensor(value, device=trainer.strategy.root_device).clone()
            if trainer.world_size > 1:
                value = trainer.strategy.reduce(value.float(), reduce_op="mean")
            return value.cpu()

        # It is not saved where a strategy shards the gradient, or where other ranks may not take part in averaging it:
        # after a resume the window starts over.
        alone = trainer.interrupted and trainer.world_size > 1
        batches = 0 if alone or own_scaling(trainer.strategy) else self._batches
        state = {
            "reference": self.reference,
            "batches": batches,
            "factor": self._factor,
            **rule_state(self.found and self.found.count),
        }
        if batches > 0:
            state["targets"] = mean(self._targets)
            state["grads"] = {name: mean(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}
        checkpoint["TokenWeightedAccumulation"] = state

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Mapping[str, object]
    ) -> None:
        """Hook: gradients are restored in ``on_train_start``, when the model is on its device."""
        self._restored = checkpoint.get("TokenWeightedAccumulation")
        self.found_before = rule_in(self._restored or {})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called after Lightning's own ``zero_grad`` at the start of a run."""
        if any(isinstance(unwrap_optimizer(optimizer), LBFGS) for optimizer in trainer.optimizers):
            why = "it computes the gradient several times per step, each time of the last batch alone"
            way_out = "Use MicroBatching(n) on larger batches, or another optimizer"
            raise TypeError(explain(f"{type(self).__name__} with LBFGS", why, way_out))
        state, self._restored = self._restored, None
        if state is not None:
            self.reference, self._batches, self._factor = state["reference"], state["batches"], state["factor"]
            self._targets = state["targets"].to(pl_module.device) if self._batches else 0
            parameters = dict(pl_module.named_parameters())
            for name, grad in state.get("grads", {}).items():
                parameters[name].grad = grad.to(parameters[name])
        # Lightning asks about the last batch of an interrupted run before it fetches the next.
        self._asked_for = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._continues = self._batches > 0
