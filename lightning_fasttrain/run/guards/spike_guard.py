"""A step whose loss or gradient norm is far above what it was lately is skipped; the run may go back before it."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, number_of, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.run.guards._last_checkpoint import LastCheckpoint
from lightning_fasttrain.run.guards._schedules import hold_schedules_
from lightning_fasttrain.run.guards.rolling_quantile import RunningLimit
from lightning_fasttrain.run.guards.skip_step import device_of, hold_steps_, parameters_with_gradient
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Technique


class SteadySteps:
    """Skips steps whose loss or gradient norm is far above its running quantiles, on all ranks alike.

    The limit of each is median + far · (9th decile − 1st decile) of the latest good steps. Loss and norm are compared
    on the device. When the host waits for them, see :class:`~lightning_fasttrain.run.FiniteSteps`; with several
    processes there is one all-reduce of the loss. A step that is not finite is not judged here.

    Args:
        far: how many of these bands a spike lies above the median.
        window: steps over which quantiles are taken.
        after: good steps before the first judgement.
        stop_after: steps in a row that are skipped, before it is an error.

    Attributes:
        skipped: steps so far.
        in_a_row: of them, since the last good one.

    Raises:
        TypeError, ValueError: an argument is unfit.
        RuntimeError: in ``optimizer.step()``: so many steps in a row were skipped.

    Example:
        >>> net = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        >>> steps = SteadySteps(after=3)
        >>> undo = steps.guard_(optimizer)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     for scale in (1.0, 1.1, 1.0, 50.0):
        ...         optimizer.zero_grad()
        ...         loss = net(torch.full((1, 1), scale)).square().sum()
        ...         loss.backward()
        ...         steps.note_loss(loss)
        ...         optimizer.step()
        >>> "gradient norm" in str(told[0].message)
        True
        >>> steps.skipped
        1

    Source:
        Chowdhery et al. 2022, "PaLM", section 5.1: spikes went away when the run passed over the data around them.
        Lightning's ``SpikeDetection`` for Fabric compares with a running mean, and raises.
    """

    def __init__(self, far: float = 6.0, window: int = 100, after: int = 20, stop_after: int = 10) -> None:
        if not far > 0:
            raise ValueError(explain(f"far={far}", "a limit below the median skips good steps", "Use far=6"))
        self.far, self.window = far, positive_int("window", window)
        self.after, self.stop_after = positive_int("after", after), positive_int("stop_after", stop_after)
        if after > window:
            why = f"only {window} steps are remembered"
            raise ValueError(explain(f"after={after} with window={window}", why, "Use a larger window"))
        self.limits = tuple(RunningLimit(far, window, after) for _ in ("loss", "norm"))
        self.skipped = self.in_a_row = 0
        self.where: Callable[[], str] = lambda: ""
        self.after_skip: Callable[[], None] = lambda: None
        self._losses: list[Tensor] = []
        self._seen: Tensor | None = None

    def guard_(self, optimizer: Optimizer) -> Undo:
        """Take a place before the steps of ``optimizer``; returns how to leave it."""
        return hold_steps_(optimizer, self._look, self._tell)

    def note_loss(self, loss: Tensor) -> None:
        """Have a loss decide on the coming step; several of one step are added up."""
        self._losses.append(loss.detach().float())  # detached: the graph of the loss must not outlive the step

    def look(self, optimizer: Optimizer) -> None:
        """Judge the gradients as they are now: call it before they are clipped. Otherwise ``step`` does it itself."""
        gradients = [_entries_of(parameter.grad) for parameter in parameters_with_gradient(optimizer)]
        norm = torch.nn.utils.get_total_norm(gradients)
        # A collective: the ranks hold pieces of the gradients.
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float().to(device_of(optimizer))
        loss = _mean_over_ranks(sum(self._losses, torch.zeros_like(norm)))
        self._losses = []
        numbers = torch.stack([loss, norm])
        # filled in by kernels: a copy from the host would wait for the device
        limits = torch.stack([torch.full_like(norm, limit.value) for limit in self.limits])
        # What is not finite is FiniteGuard's: it must not be skipped here, nor enter the quantiles.
        spike = (numbers > limits).any() & numbers.isfinite().all()
        self._seen = torch.cat([spike.float()[None], numbers])

    def state_dict(self) -> dict[str, Any]:
        values = [list(limit.values) for limit in self.limits]
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        for limit, values in zip(self.limits, state["values"], strict=True):
            limit.values.clear()
            limit.values.extend(values)  # the deque keeps its length

    def _look(self, optimizer: Optimizer) -> Tensor:
        if self._seen is None:
            self.look(optimizer)
        assert self._seen is not None
        seen, self._seen = self._seen, None
        return seen

    def _tell(self, values: list[float]) -> None:
        bad, *numbers = values
        if not bad:
            if all(map(math.isfinite, numbers)):  # a step that is not finite is neither good nor a spike
                self.in_a_row = 0
            for limit, number in zip(self.limits, numbers, strict=True):
                limit.add(number)
            return
        self.skipped += 1
        self.in_a_row += 1
        self.after_skip()
        found = zip(("loss", "gradient norm"), numbers, self.limits, strict=True)
        above = " and ".join(f"{name} {n:.4g} above {limit.value:.4g}" for name, n, limit in found if n > limit.value)
        what = f"a step was skipped: {above}, the limit of the last {len(self.limits[0].values)} steps{self.where()}"
        if self.in_a_row < self.stop_after:
            warn(f"{what} (skipped so far: {self.skipped}).")
            return
        why = f"that is {number_of(self.in_a_row, 'step')} in a row, so it is no spike but where training is now"
        raise RuntimeError(explain(what, why, "Lower the learning rate, look at the data, or raise far"))


def _entries_of(gradient: Any) -> Tensor:
    """torch has no norm of sparse gradients, which are an embedding's."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _mean_over_ranks(loss: Tensor) -> Tensor:
    if rank_count() > 1:
        dist.all_reduce(loss)  # the gradients are shared by all, the losses are each rank's own
        loss = loss / rank_count()
    return loss


class SpikeGuard(Technique):
    """Skip steps whose loss or gradient norm is far above its running quantiles, or go back before them.

    With ``then="rewind"`` the step is skipped too, and weights, optimizer and schedules become those of the last
    checkpoint that the run saved. The loader goes on: so what was trained on since that checkpoint is passed over,
    and is not seen again in this epoch. ``global_step``, callbacks and random states go on as well, and training ends
    at the same batch. Before there is a checkpoint a spike is only skipped, and it is said.

    A skipped step leaves weights, optimizer state and schedules by step as they were, on all ranks; ``global_step``
    counts it. Where nothing is skipped the training is the plain one, bit for bit. Values for quantiles are in
    checkpoints, so a resumed run judges and goes back as the uninterrupted one.

    Acts in ``on_before_optimizer_step``, before gradients are clipped, and in ``optimizer.step``. The loss is the one
    that gradients are taken of, so with :class:`~lightning_fasttrain.TokenWeightedAccumulation` it grows with the
    number of targets in a window.

    Args:
        then: ``"skip"`` the step, or ``"rewind"``; that needs one device or DDP, and a ModelCheckpoint.
        far, window, after, stop_after: as for :class:`~lightning_fasttrain.run.SteadySteps`.
        most_rewinds: in a run, before it is an error.

    Raises:
        TypeError, ValueError: an argument is unfit; in ``fit``: manual optimisation, a loss scaler, or ``"rewind"``
            with a strategy that shards.
        RuntimeError: in ``fit``: too many skips in a row, or rewinds.

    Example:
        >>> guard = SpikeGuard("rewind", far=8)

    Source:
        See :class:`~lightning_fasttrain.run.SteadySteps`. PaLM went back about 100 steps and passed over 200 to 500
        batches.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING  # where there is a spike
    effect: ClassVar[str] = "a step with a spike of loss or gradient is skipped, or the run goes back before it"
    when: ClassVar[str] = "a long run that diverges now and then; not where losses differ widely from batch to batch"
    in_a_loop: ClassVar[str] = "run.SteadySteps().guard_(optimizer)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        early = "weights are updated during the backward, before all gradients are known"
        engine = "DeepSpeed's engine holds the gradients and steps by itself"
        return (
            Conflict(Capability.UPDATES_IN_BACKWARD, early, "Use one of them"),
            Conflict(DeepSpeedStrategy, engine, "Use FSDP2 or DDP"),
        )

    def __init__(
        self,
        then: Literal["skip", "rewind"] = "skip",
        far: float = 6.0,
        window: int = 100,
        after: int = 20,
        stop_after: int = 10,
        most_rewinds: int = 3,
    ) -> None:
        self.then = one_of("then", then, ("skip", "rewind"))
        self.steps = SteadySteps(far, window, after, stop_after)
        self.most_rewinds = positive_int("most_rewinds", most_rewinds)
        self.rewinds = 0
        self._last = LastCheckpoint()
        self._batch_idx = 0
        self._skipped_now = False
        self._run = ExitStack()

    @property
    def skipped(self) -> int:
        """Steps so far."""
        return self.steps.skipped

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_settings(self.then, trainer, pl_module)
        self._run = undo = ExitStack()
        self._last = LastCheckpoint()
        undo.callback(self._last.watch(trainer))
        return undo.close

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first at which there is an optimizer."""
        self.steps.where = lambda: f"; epoch {trainer.current_epoch}, batch {self._batch_idx}"
        self.steps.after_skip = self._note_skip
        self._run.callback(self._forget)
        self._run.callback(self.steps.guard_(trainer.optimizers[0]))
        self._run.callback(hold_schedules_(trainer, pl_module, lambda: self._skipped_now))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: all that a checkpoint holds is loaded."""
        self._last.begin(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the number of the batch, for what may have to be said."""
        self._batch_idx = batch_idx
        self._skipped_now = False

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Hook: each loss, also those of parts of a batch."""
        self.steps.note_loss(loss)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the last before clipping, which would hide how large a gradient was."""
        self.steps.look(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the step is over, so the state may be replaced."""
        if not (self._skipped_now and self.then == "rewind"):
            return
        if not self._last.path:
            warn("SpikeGuard('rewind'): the run has saved no checkpoint yet, so the step was only skipped.")
            return
        self.rewinds += 1
        what = f"the run goes back from step {trainer.global_step} to {self._last.path} of step {self._last.step}"
        if self.rewinds > self.most_rewinds:
            why = f"it did so {number_of(self.most_rewinds, 'time')} already"
            raise RuntimeError(explain(what, why, "Lower the learning rate, or look at the data"))
        self._last.go_back(trainer)
        warn(f"SpikeGuard: {what}; batches up to {batch_idx} are passed over (rewinds so far: {self.rewinds}).")

    def outcome(self, model: torch.nn.Module) -> str:
        if not self.skipped:
            return ""
        back = f", went back {number_of(self.rewinds, 'time')}" if self.rewinds else ""
        return f"skipped {number_of(self.skipped, 'step')}{back}"

    def state_dict(self) -> dict[str, Any]:
        return {**self.steps.state_dict(), "rewinds": self.rewinds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.load_state_dict(state_dict)
        self.rewinds = state_dict["rewinds"]

    def _note_skip(self) -> None:
        self._skipped_now = True

    def _forget(self) -> None:
        self.steps.where, self.steps.after_skip = lambda: "", lambda: None


def _refuse_settings(then: str, trainer: L.Trainer, module: L.LightningModule) -> None:
    unfit = [
        (
            not module.automatic_optimization,
            "automatic_optimization=False",
            "the module steps its optimizers itself, and there may be several",
            "Call run.SteadySteps().guard_(optimizer) for the one that matters",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r}",
            "its loss scaler changes the size of losses and gradients",
            "Use precision='bf16-mixed'",
        ),
        (
            then == "rewind" and not replicates(trainer.strategy),
            f"then='rewind' under {type(trainer.strategy).__name__}",
            "it loads a checkpoint by itself, into the model as it was before it was sharded",
            "Use then='skip', or DDP",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(f"SpikeGuard with {what}", why, way_out))
