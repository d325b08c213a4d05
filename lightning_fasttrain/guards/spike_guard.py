"""Skip steps whose loss or gradient norm is far above its recent values, or restore an earlier checkpoint."""

import bisect
import functools
import itertools
import math
import os
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import (
    PositiveFloat,
    PositiveInt,
    check_arguments,
    one_of,
)
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import call_module, replicates
from lightning_fasttrain.core.host.optimizer_steps import gradient_norm, is_deepspeed, unwrap_optimizer
from lightning_fasttrain.core.messages import explain, number_of, warn
from lightning_fasttrain.core.modules.parameters import gradients_of, parameters_of, values_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all, undo_all
from lightning_fasttrain.guards.step_guard import (
    JudgedSteps,
    StepGuard,
    device_of,
    hold_steps_,
)
from lightning_fasttrain.technique import Exactness


class RunningLimit:
    """A limit above the running quantiles: median + far · (9th decile − 1st decile), over the latest good steps.

    A band close to zero, as for a constant loss, is replaced by 1% of the median.

    Args:
        far: number of bands above the median.
        window: number of steps that are kept.
        after: number of steps before there is a limit.

    Example:
        >>> limit = RunningLimit(far=4, window=10, after=5)
        >>> for value in [1.0, 1.1, 0.9, 1.0]:
        ...     limit.add(value)
        >>> limit.value
        inf
        >>> limit.add(1.0)
        >>> round(limit.value, 6)
        1.48
    """

    def __init__(self, far: PositiveFloat, window: PositiveInt, after: PositiveInt) -> None:
        self.far, self.after = far, after
        self.values: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        # Otherwise infinity would be the limit from then on.
        if not math.isfinite(value):
            return
        if len(self.values) == self.values.maxlen:
            del self._ordered[bisect.bisect_left(self._ordered, self.values[0])]
        self.values.append(value)
        bisect.insort(self._ordered, value)

    @property
    def value(self) -> float:
        if len(self.values) < self.after:
            return math.inf
        low, middle, high = (_quantile(self._ordered, share) for share in (0.1, 0.5, 0.9))
        return middle + self.far * max(high - low, 0.01 * abs(middle))


Limits = tuple[RunningLimit, RunningLimit]  # of the loss, and of the norm of its gradient


def _quantile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated; NumPy's takes a hundred times as long."""
    below, part = divmod(share * (len(ordered) - 1), 1)
    above = ordered[min(int(below) + 1, len(ordered) - 1)]
    return ordered[int(below)] + part * (above - ordered[int(below)])


@check_arguments
class SteadySteps(JudgedSteps):
    """Skips steps whose loss or gradient norm is far above its running quantiles, on all ranks.

    The limit of each is median + far · (9th decile − 1st decile) of the latest good steps of the same optimizer. Loss
    and norm are compared on the device. For when the host waits, see :class:`~lightning_fasttrain.guards.FiniteSteps`;
    with several processes the loss is all-reduced once. Steps that are not finite are ignored here.

    Args:
        far: number of these bands between the median and a spike.
        window: number of steps over which quantiles are taken.
        after: number of good steps before the first decision.
        stop_after: number of consecutive skipped steps after which an error is raised.

    Attributes:
        skipped: number of skipped steps so far.
        in_a_row: number of skipped steps since the last good one.

    Raises:
        TypeError, ValueError: an argument is invalid.
        RuntimeError: in ``optimizer.step()``: ``stop_after`` consecutive steps were skipped.

    Example:
        >>> net = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        >>> steps = SteadySteps(after=3)
        >>> undo = steps.guard_(optimizer)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for scale in (1.0, 1.1, 1.0, 50.0):
        ...         optimizer.zero_grad()
        ...         loss = net(torch.full((1, 1), scale)).square().sum()
        ...         loss.backward()
        ...         steps.note_loss(loss)
        ...         optimizer.step()
        >>> "gradient norm" in str(caught[0].message)
        True
        >>> steps.skipped
        1

    Source:
        Chowdhery et al. 2022, "PaLM", section 5.1: spikes disappeared when the run skipped the data around them.
        Lightning's ``SpikeDetection`` for Fabric compares with a running mean, and raises.
    """

    failure: ClassVar[type[Exception]] = RuntimeError
    persists: ClassVar[str] = "this is not a spike but the current level"
    way_out: ClassVar[str] = "Lower the learning rate, check the data, or increase far"

    def __init__(
        self, far: PositiveFloat = 6.0, window: PositiveInt = 100, after: PositiveInt = 20, stop_after: PositiveInt = 10
    ) -> None:
        super().__init__(stop_after)
        self.far, self.window, self.after = far, window, after
        if after > window:
            why = f"only {window} steps are kept"
            raise ValueError(explain(f"after={after} with window={window}", why, "Use a larger window"))
        self._limits: list[Limits] = []
        # Optimizer → place of its limits.
        self._places: dict[int, int] = {}
        self._seen: Tensor | None = None

    def guard_(self, optimizer: Optimizer) -> Undo:
        """Guard the steps of ``optimizer``, which has limits of its own; return how to undo it."""
        optimizer = unwrap_optimizer(optimizer)
        # The first that is free, which may be that of an optimizer of an earlier run.
        taken = set(self._places.values())
        self._places[id(optimizer)] = next(place for place in itertools.count() if place not in taken)
        undo = hold_steps_(optimizer, self.judge, functools.partial(self._tell, optimizer))
        return undo_all([functools.partial(self._places.__delitem__, id(optimizer)), undo])

    def limits(self, optimizer: Optimizer) -> Limits:
        """Return the limits of the loss and of the gradient norm of an optimizer."""
        place = self._places.get(id(unwrap_optimizer(optimizer)), 0)
        while len(self._limits) <= place:
            # Checkpoints are loaded before the optimizers are guarded.
            self._limits.append(self._make_limits())
        return self._limits[place]

    def _make_limits(self) -> Limits:
        settings = self.far, self.window, self.after
        return RunningLimit(*settings), RunningLimit(*settings)

    def note_loss(self, loss: Tensor) -> None:
        """Include a loss in the decision on the coming step of any optimizer; those of one step are added up."""
        # Detached, since the graph of the loss must not outlive the step.
        self.losses.append(loss.detach().float())

    def look(self, optimizer: Optimizer) -> None:
        """Check the gradients as they are now: call it before they are clipped. Otherwise ``step`` does it itself."""
        optimizer = unwrap_optimizer(optimizer)
        if is_deepspeed(optimizer):
            norm = gradient_norm(optimizer)
        else:
            norm = torch.nn.utils.get_total_norm(list(map(values_of, gradients_of(parameters_of(optimizer)))))
        # A collective: the ranks hold shards of the gradients.
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.float().to(device_of(optimizer))
        losses = [loss.to(norm.device) for loss in self.losses]  # a resumed one may be elsewhere
        loss = _mean_over_ranks(torch.stack(losses or [torch.zeros_like(norm)]).sum())
        self.losses = []
        of_loss, of_norm = self.limits(optimizer)
        # Limits are arguments of the kernels: a copy from the host would wait for the device.
        excess = torch.maximum(loss - of_loss.value, norm - of_norm.value)
        # Non-finite values are FiniteGuard's task: they must neither be skipped here nor enter the quantiles. A NaN is
        # neither above 0 nor below infinity.
        spike = (excess > 0) & (excess < torch.inf)
        self._seen = torch.stack([spike.float(), loss, norm])

    def state_dict(self) -> dict[str, Any]:
        values = [(list(of_loss.values), list(of_norm.values)) for of_loss, of_norm in self._limits]
        return {**super().state_dict(), "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._limits = []
        for both in state["values"]:
            self._limits.append(self._make_limits())
            for limit, values in zip(self._limits[-1], both, strict=True):
                for value in values:  # the limit keeps as many as its window
                    limit.add(value)

    def judge(self, optimizer: Optimizer) -> Tensor:
        if self._seen is None:
            self.look(optimizer)
        assert self._seen is not None
        seen, self._seen = self._seen, None
        return seen

    def _tell(self, optimizer: Optimizer, values: list[float]) -> None:
        bad, *numbers = values
        limits = self.limits(optimizer)
        if not bad:
            # A step that is not finite is neither good nor a spike.
            if all(map(math.isfinite, numbers)):
                self.in_a_row = 0
            for limit, number in zip(limits, numbers, strict=True):
                limit.add(number)
            return
        found = zip(("loss", "gradient norm"), numbers, limits, strict=True)
        above = " and ".join(f"{name} {n:.4g} exceeds {limit.value:.4g}" for name, n, limit in found if n > limit.value)
        self.count_skip(f": {above}, the limit of the last {len(limits[0].values)} steps{self.where()}")


def _mean_over_ranks(loss: Tensor) -> Tensor:
    if rank_count() > 1:
        dist.all_reduce(loss)  # gradients are shared by all ranks, losses are not
        loss = loss / rank_count()
    return loss


class SpikeGuard(StepGuard):
    """Skip steps whose loss or gradient norm is far above its running quantiles, or rewind to a checkpoint.

    With ``then="rewind"`` the step is skipped too, and weights, optimizer and schedules are restored from the last
    checkpoint that the run saved. The loader is not rewound: data since that checkpoint are skipped, and not repeated
    in this epoch. ``global_step``, callbacks and random states are not rewound either, and training ends at the same
    batch. Before the first checkpoint a spike is only skipped, with a warning.

    A skipped step changes neither weights, optimizer state nor per-step schedules, on any rank; ``global_step`` counts
    it. As long as nothing is skipped, training is bitwise unchanged. The values for the quantiles are saved in
    checkpoints, so a resumed run skips and rewinds as the uninterrupted one does.

    Acts in ``on_before_optimizer_step``, before gradients are clipped, and in ``optimizer.step``. The loss is the one
    that is differentiated, so with :class:`~lightning_fasttrain.TokenWeightedAccumulation` it grows with the number
    of targets in a window.

    Args:
        then: ``"skip"`` the step, or ``"rewind"``, which needs one device or DDP, and a ModelCheckpoint.
        far, window, after, stop_after: as in :class:`~lightning_fasttrain.guards.SteadySteps`.
        most_rewinds: number of rewinds in a run before an error is raised.

    Raises:
        TypeError, ValueError: an argument is invalid; in ``fit``: a loss scaler, or ``"rewind"``
            with a sharding strategy.
        RuntimeError: in ``fit``: too many consecutive skips, or too many rewinds.

    Example:
        >>> guard = SpikeGuard("rewind", far=8)

    Source:
        See :class:`~lightning_fasttrain.guards.SteadySteps`. PaLM rewound about 100 steps and skipped 200 to 500
        batches.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING  # where there is a spike
    effect: ClassVar[str] = "a step with a spike of loss or gradient is skipped, or the run rewinds to a checkpoint"
    when: ClassVar[str] = "a long run diverges now and then; not where losses differ widely from batch to batch"
    in_a_loop: ClassVar[str] = "guards.SteadySteps().guard_(optimizer)"
    steps: SteadySteps

    def __init__(
        self,
        then: Literal["skip", "rewind"] = "skip",
        far: PositiveFloat = 6.0,
        window: PositiveInt = 100,
        after: PositiveInt = 20,
        stop_after: PositiveInt = 10,
        most_rewinds: PositiveInt = 3,
    ) -> None:
        super().__init__(SteadySteps(far, window, after, stop_after))
        self.then = one_of("then", then, ("skip", "rewind"))
        self.most_rewinds = most_rewinds
        self.rewinds = 0
        self._last = LastCheckpoint()

    def _watch_saves(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        _refuse_settings(self.then, trainer)
        self._last = LastCheckpoint()
        self._run.callback(self._last.watch(trainer))

    def _guard(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> Undo:
        return self.steps.guard_(optimizer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the checkpoint is completely loaded."""
        self._last.begin(trainer)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Hook: each loss, including those of micro-batches."""
        self.steps.note_loss(loss)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the last before clipping, which would hide the size of a gradient."""
        self.steps.look(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the step is over, so the state may be replaced."""
        if not (self.steps.skipped_now and self.then == "rewind"):
            return
        if not self._last.path:
            warn(
                "SpikeGuard('rewind'): no checkpoint was saved yet, so the step was only skipped. Save them more often."
            )
            return
        self.rewinds += 1
        what = f"the run rewinds from step {trainer.global_step} to {self._last.path} of step {self._last.step}"
        if self.rewinds > self.most_rewinds:
            why = f"it has rewound {number_of(self.most_rewinds, 'time')} already"
            raise RuntimeError(explain(what, why, "Lower the learning rate, or check the data"))
        self._last.go_back(trainer)
        warn(f"SpikeGuard: {what}; batches up to {batch_idx} are skipped (rewinds so far: {self.rewinds}).")

    def outcome(self, model: torch.nn.Module) -> str:
        back = f", rewound {number_of(self.rewinds, 'time')}" if self.rewinds else ""
        return super().outcome(model) + back

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rewinds": self.rewinds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.rewinds = state_dict["rewinds"]


def _refuse_settings(then: str, trainer: L.Trainer) -> None:
    unfit = [
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r}",
            "its loss scaler changes the size of losses and gradients",
            "Use precision='bf16-mixed'",
        ),
        (
            then == "rewind" and not replicates(trainer.strategy),
            f"then='rewind' under {type(trainer.strategy).__name__}",
            "the strategy loads a checkpoint itself, into the model before sharding",
            "Use then='skip', or DDP",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(f"SpikeGuard with {what}", why, way_out))


class LastCheckpoint:
    """The newest complete checkpoint of a run, with weights, optimizers and schedules.

    Attributes:
        path: its file; "" if there is none.
        step: the optimizer step after which it was saved.
    """

    def __init__(self) -> None:
        self.path, self.step = "", 0

    def watch(self, trainer: L.Trainer) -> Undo:
        """Track the checkpoints that this run saves, until undone."""
        strategy = trainer.strategy
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: str | Path, *args: object, **kwargs: object) -> None:
            save(checkpoint, filepath, *args, **kwargs)
            if "optimizer_states" in checkpoint:  # absent with save_weights_only
                self.path, self.step = os.fspath(filepath), checkpoint["global_step"]

        def remove_checkpoint(filepath: str | Path) -> None:
            remove(filepath)
            # ModelCheckpoint keeps only the best ones, and may remove this one.
            if os.fspath(filepath) == self.path:
                self.path = ""

        changed = {"save_checkpoint": save_checkpoint, "remove_checkpoint": remove_checkpoint}
        return patch_all(strategy, changed)

    def begin(self, trainer: L.Trainer) -> None:
        """Start with the checkpoint that the run was resumed from, if any."""
        self.path, self.step = os.fspath(trainer.ckpt_path or ""), trainer.global_step

    def go_back(self, trainer: L.Trainer) -> None:
        """Restore weights, optimizers and schedules; loops, loaders and callbacks keep their state."""
        strategy, module = trainer.strategy, trainer.lightning_module
        checkpoint = strategy.load_checkpoint(self.path, weights_only=True)
        # In Lightning's order: the hook may change what is then loaded.
        call_module(trainer, "on_load_checkpoint", checkpoint)
        strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
