"""Batch size warmup: optimizer steps of few batches at first, and of more and more later."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import lightning as L
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.loaders.growth_schedule import Growth, KeepsGrowth
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count
from lightning_fasttrain.micro_batching.token_weighted_accumulation import TokenWeightedAccumulation
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import Facts
from lightning_fasttrain.technique.duration import LENGTHS, Length

RULES: dict[str, Callable[[float], float]] = {"linear": lambda share: share, "sqrt": math.sqrt}


@check_arguments
def scale_rates_(optimizer: Optimizer, factor: Callable[[], float]) -> Undo:
    """Multiply the learning rates of all groups by ``factor()`` in each update of ``optimizer``.

    Outside of updates the groups have the learning rates of their schedule, so this composes with any schedule.

    Args:
        optimizer: any optimizer.
        factor: called before each update.

    Returns:
        A function that undoes it.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> undo = scale_rates_(optimizer, lambda: 0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (-0.25, 1.0)

    Source:
        Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear, for SGD); Malladi et al. 2022,
        https://arxiv.org/abs/2205.10287 (square root, for Adam).
    """
    scaled: list[tuple[dict[str, Any], Any, Any]] = []  # group, its learning rate, the scaled one

    def scale(optimizer: Optimizer, *_: object) -> None:
        restore()  # after an update whose closure raised
        by = factor()
        for group in optimizer.param_groups:
            own, group["lr"] = group["lr"], group["lr"] * by
            scaled.append((group, own, group["lr"]))

    def restore(*_: object) -> None:
        for group, own, used in scaled:
            if group["lr"] is used:  # otherwise a schedule has already set the next one
                group["lr"] = own
        scaled.clear()

    hooks = [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]

    def undo() -> None:
        restore()
        for hook in hooks:
            hook.remove()

    return undo


@check_arguments
def grow_windows(batches: Iterable[object], growth: Growth) -> Iterator[list[Any]]:
    """Yield the batches of each optimizer step, in growing numbers, for :func:`~lightning_fasttrain.accumulate_window`.

    Args:
        batches: the batches of an epoch; its last window may be short.
        growth: counts batches, and continues over epochs if it is passed to each; its state can be resumed.

    Example:
        >>> import torch
        >>> [len(window) for window in grow_windows([torch.zeros(2)] * 9, Growth(1, 3, over="6 samples"))]
        [1, 1, 2, 3, 2]
    """
    growth.begin_loop()
    window: list[Any] = []
    size = growth.size  # fixed for this window; counting affects the next one
    for batch in batches:
        window.append(batch)
        growth.add(batch)
        if len(window) == size:
            with growth.counting(steps=1):
                yield window
            window = []
            size = growth.size
    if window:
        with growth.counting(steps=1):
            yield window


class BatchSizeWarmup(KeepsGrowth, TokenWeightedAccumulation):
    """Start with optimizer steps of ``start`` batches, and grow to ``full`` batches in equal increments.

    Early in a run, small batches are as informative with fewer samples; large ones are needed later. The loader's
    batches stay unchanged, and a step sums ``n`` of them, with the same weight for every target: a
    :class:`~lightning_fasttrain.TokenWeightedAccumulation` whose factor grows. Samples and tokens are counted over all
    processes; if the growth depends on them, processes synchronize once a step until it ends.

    Args:
        full: number of the loader's batches per step, after the growth.
        over: duration of the growth: optimizer steps, or ``"1e6 samples"``, ``"1e9tok"``.
        start: number of batches in the first steps.
        rate: how learning rates follow. In a step of n batches, ``"linear"`` multiplies the values of the optimizer and
            its schedule by n / full, as suits SGD, and ``"sqrt"`` by √(n / full), as suits Adam; None keeps them. Each
            change is logged.
        count, check: as for :class:`~lightning_fasttrain.TokenWeightedAccumulation`.

    Attributes:
        growth: the current ``size``, and the numbers of ``samples`` and ``tokens`` so far.

    Raises:
        TypeError, ValueError: as for :class:`~lightning_fasttrain.TokenWeightedAccumulation`; sizes that do not grow; a
            duration in epochs or a share of the run, which itself depends on how steps grow.

    Example:
        >>> warmup = BatchSizeWarmup(full=8, over="1e9tok", rate="sqrt")
        >>> [warmup.growth.size_at(tokens) for tokens in (0, 5e8, 1e9)]
        [1, 4, 8]

    Source:
        McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", https://arxiv.org/abs/1812.06162; the
        growth in equal steps is that of Megatron-LM's ``--rampup-batch-size``.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    ways_out: ClassVar[Mapping[str, str]] = {"over": LENGTHS}
    effect: ClassVar[str] = "steps of few batches first and of more later, optionally with scaled learning rates"
    when: ClassVar[str] = "a large batch is only useful late in the run; not for fine-tuning"
    in_a_loop: ClassVar[str] = "accumulate_window(step, window) for window in loaders.grow_windows(loader, growth)"

    def __init__(
        self,
        full: int,
        over: int | str | Length,
        start: int = 1,
        rate: str | None = None,
        count: Count = "auto",
        check: bool = True,
    ) -> None:
        self.growth = Growth(start, full, over)
        if self.growth.until is None:
            why = "the number of steps in it depends on how they grow"
            raise ValueError(explain(f"over={over!r}", why, "Give steps, samples or tokens"))
        # Predictions ask the schedule for its largest window; factor_in returns the current one.
        super().__init__({0: full}, "step", count, check)
        self.rate = None if rate is None else one_of("rate", rate, tuple(RULES))
        self._hooks = ExitStack()
        self._said: int | None = None  # the size; None before the run begins

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return None

    def describe_effect(self, model: nn.Module) -> str:
        growth = self.growth
        return f"steps grow from {growth.start} to {growth.full} batches over {growth.over}"

    def factor_in(self, epoch: int, step: int) -> int:
        """Return the batches of a window that begins at an optimizer step; on other clocks, of the next window."""
        return self.growth.size_at(step) if self.growth.clock == "steps" else self.growth.size

    def count_windows(self, batches: int, epoch: int, before: int) -> int:
        if self.growth.clock != "steps":
            what = f"the number of steps with BatchSizeWarmup over {self.growth.over}"
            why = "steps end by the number of samples or tokens, so the number of steps is unknown"
            raise ValueError(explain(what, why, f"Give the total in {self.growth.clock}, or the growth in steps"))
        return super().count_windows(batches, epoch, before)

    def _stays_from(self, step: int) -> bool:
        return self.growth.until is not None and step >= self.growth.until

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self.growth.begin()
        leave = super().attach(trainer, pl_module)
        assert leave is not None

        def undo() -> None:
            self._hooks.close()
            self._said = None
            leave()

        return undo

    def _factor_now(self) -> int:
        trainer = self._trainer
        assert trainer is not None
        if self.growth.clock != "steps" and self.growth.is_growing:
            # A collective: all ranks get here when a window begins, and their windows are the same.
            self.growth.agree(trainer.world_size)
        self.growth.steps = trainer.global_step
        size = self.growth.size
        if self._said is not None and size != self._said:
            self._said = size
            follows = "" if self.rate is None else f", learning rate × {self._rate_at(size):.3g}"
            say(
                "BatchSizeWarmup: from step %d on, %d of %d batches per step%s",
                self.growth.steps,
                size,
                self.growth.full,
                follows,
            )
        return size

    def _rate_at(self, size: int) -> float:
        assert self.rate is not None
        return RULES[self.rate](size / self.growth.full)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the optimizers exist, and the checkpoint is loaded."""
        super().on_train_start(trainer, pl_module)
        self._said = 0
        if self.rate is None:
            return
        for optimizer in trainer.optimizers:
            inner: Any = optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer  # DeepSpeed's wrapper
            # The factor is set when a window begins, and is unchanged when it steps.
            self._hooks.callback(scale_rates_(inner, lambda: self._rate_at(self._factor)))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: called before this batch is counted; the window is set first."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.growth.add(batch)
