"""Skip steps with a loss or gradient that is not finite, on all ranks, and name the cause."""

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import gather_values, is_sharded
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.host.optimizer_steps import (
    has_unfinite_gradient,
    is_deepspeed,
    unwrap_optimizer,
    whole_gradient,
)
from lightning_fasttrain.core.messages import describe_error, explain, list_some
from lightning_fasttrain.core.modules.parameters import gradients_of, parameters_of
from lightning_fasttrain.core.modules.select import modules_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.guards.step_guard import (
    JudgedSteps,
    StepGuard,
    agree,
    device_of,
    has_room_for_nan,
    has_unfinite,
    hold_steps_,
    local_values,
)


@check_arguments
class FiniteSteps(JudgedSteps):
    """Skips steps whose gradients or losses are not finite, on all ranks; counts them, and stops after several.

    The check computes one infinity norm of the gradients on the device and, with several processes, all-reduces one
    scalar. With torch's fused optimizers the device skips the step, and the host reads the result during the update;
    with all other optimizers the host waits for the backward before the update.

    With a loss scaler, overflowing gradients are left to the scaler: it skips, halves its scale, and they are not
    counted here. A loss that is not finite, and gradients that overflow at a scale below 1, are counted.

    BatchNorm statistics from a bad batch are restored too.

    Args:
        stop_after: number of consecutive skipped steps after which an error is raised.

    Attributes:
        skipped: number of skipped steps so far.
        in_a_row: number of skipped steps since the last good one.
        losses: of the coming step: pairs of the index of a batch and its loss, on the device.

    Raises:
        TypeError, ValueError: ``stop_after`` is not an integer of at least 1.
        FloatingPointError: in ``optimizer.step()``: ``stop_after`` consecutive steps were skipped.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(net.parameters())
        >>> steps = FiniteSteps(stop_after=3)
        >>> undo = steps.guard_(optimizer, net)
        >>> loss = net(torch.tensor([float("nan"), 1.0])).sum()
        >>> loss.backward()
        >>> steps.note_loss(loss)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     optimizer.step()
        >>> str(caught[0].message)
        'a step was skipped because its loss or gradient is not finite (skipped so far: 1).'
        >>> steps.skipped, optimizer.state_dict()["state"]
        (1, {})

    Source:
        The rule of loss scaling (Micikevicius et al. 2018, "Mixed Precision Training"), for every precision.
    """

    failure: ClassVar[type[Exception]] = FloatingPointError
    persists: ClassVar[str] = "the cause is unlikely to disappear by itself"
    way_out: ClassVar[str] = "Check that batch and layer, lower the learning rate, or resume from an older checkpoint"

    def __init__(self, stop_after: PositiveInt = 3) -> None:
        super().__init__(stop_after)
        self._statistics: list[tuple[Tensor, Tensor]] = []  # of BatchNorm, and their values after the last good step

    def guard_(self, optimizer: Optimizer, model: nn.Module, scaler: GradScaler | None = None) -> Undo:
        """Guard the steps of ``optimizer``.

        Args:
            optimizer: one of torch or DeepSpeed, or Fabric's wrapper of one; several may be guarded, one call each.
            model: the model that it trains.
            scaler: the loss scaler, if one is used.

        Returns:
            How to undo it.

        Raises:
            TypeError: not an optimizer with one update per step.
        """
        self._statistics = [(buffer, buffer.clone()) for buffer in _statistics_of(model)]

        def tell(values: list[float]) -> None:
            if values == [0]:
                self.in_a_row = 0
                self.keep_statistics()
            # Below a scale of 1 the loss is not scaled up, so the scaler does not cause an overflow.
            elif scaler is None or self._has_bad_loss(optimizer) or scaler.get_scale() < 1:
                # Before the statistics are restored, since this repeats the forward.
                cause = self.where()
                self._restore_statistics()
                self.count_skip(f" because its loss or gradient is not finite{cause}")
            else:
                # This was an overflow, which the scaler has handled.
                self._restore_statistics()
            self.losses = []

        return hold_steps_(optimizer, self.judge, tell, scaler)

    def note_loss(self, loss: Tensor, batch: int = 0) -> None:
        """Include a loss in the check of the coming step; call it once per backward, with the index of the batch."""
        self.losses.append((batch, loss.detach()))

    def keep_statistics(self) -> None:
        """Save the current BatchNorm statistics as good ones; call it again after a checkpoint was loaded."""
        for buffer, kept in self._statistics:
            kept.copy_(buffer)

    def judge(self, optimizer: Optimizer) -> Tensor:
        """Return [1]: 1 if the step is bad."""
        device = device_of(optimizer)
        if is_deepspeed(optimizer):
            bad = has_unfinite(self._losses_on(device)).to(device)
            return agree(bad[None]).clamp(min=float(has_unfinite_gradient(optimizer)))
        # One norm for gradients and losses together: small kernels are what this check costs.
        values = [*gradients_of(parameters_of(optimizer)), *self._losses_on(device)]
        return agree(has_unfinite(values).to(device)[None])

    def _has_bad_loss(self, optimizer: Optimizer) -> bool:
        device = device_of(optimizer)
        return float(agree(has_unfinite(self._losses_on(device)).to(device))) != 0

    def _losses_on(self, device: torch.device) -> list[Tensor]:
        return [loss.to(device) for _, loss in self.losses]  # resumed ones may be elsewhere

    def _restore_statistics(self) -> None:
        for buffer, kept in self._statistics:
            buffer.copy_(kept)


@check_arguments
def refuse_unfinite(model: nn.Module, where: str = "a checkpoint", alone: bool = False) -> None:
    """Refuse to save weights or buffers that are not finite; call it before a save. Waits for the device.

    Args:
        model: the model to be saved.
        where: what would be written, for the message.
        alone: do not communicate with the other ranks, since they may not answer.

    Raises:
        FloatingPointError: on all ranks, if one has such a value; the message lists the first names.

    Example:
        >>> refuse_unfinite(nn.Linear(2, 2))

    Source:
        None: a checkpoint with NaN cannot be trained from, and often replaces the last usable one.
    """
    everything = (*model.named_parameters(), *model.named_buffers())
    named = [(name, value) for name, value in everything if has_room_for_nan(value)]
    bad = has_unfinite(value for _, value in named)
    if float(bad if alone else agree(bad)) == 0:
        return
    names = [name for name, value in named if is_unfinite(value)]
    held = f"in {list_some(names)}" if names else "on another rank"
    why = f"NaN or infinite values are {held}"
    way_out = "Resume from the last checkpoint, which is unchanged"
    raise FloatingPointError(explain(f"{where} was not written", why, way_out))


class FiniteGuard(StepGuard):
    """Skip steps whose loss or gradient is not finite, name the cause, and save no checkpoint with NaN.

    A skipped step changes neither weights, optimizer state, BatchNorm statistics nor per-step schedules, on any rank.
    ``global_step`` counts it, as it counts consumed batches. The warning names the batch and rank of the first bad
    loss, and the layer: the forward of that batch is repeated once without gradients, or, where the loss was finite,
    the gradients are searched. With sharded parameters only the gradients are searched. Gradients are shared among
    ranks, so for them no rank can be named. Under ZeRO, DeepSpeed discards the step as it discards an overflow; its
    own loss scaler, in float16, does this without a guard.

    Acts in ``optimizer.step``, after accumulation, unscaling and clipping; see :class:`FiniteSteps` for the rules,
    including those for a loss scaler, and for when the host waits. The loss of a batch without samples or targets is
    NaN, so its step is skipped too; with :class:`~lightning_fasttrain.TokenWeightedAccumulation` its weight is 0
    instead. The Trainer's ``save_checkpoint`` checks the model first and, inside an accumulation window whose step
    would end the run, losses and gradients.

    Args:
        stop_after: number of consecutive skipped steps after which the run ends with an error on all ranks.

    Raises:
        TypeError, ValueError: ``stop_after`` is not an integer of at least 1.
        FloatingPointError: in ``fit``: too many consecutive skipped steps; or a checkpoint would contain NaN.

    Example:
        >>> guard = FiniteGuard(stop_after=5)

    Source:
        See :class:`FiniteSteps`.
    """

    effect: ClassVar[str] = "a step with NaN or infinity is skipped on all ranks; batch, rank and layer are named"
    when: ClassVar[str] = "a run is long, in low precision or on unclean data"
    in_a_loop: ClassVar[str] = "guards.FiniteSteps().guard_(optimizer, model)"
    steps: FiniteSteps

    def __init__(self, stop_after: PositiveInt = 3) -> None:
        super().__init__(FiniteSteps(stop_after))
        self.stop_after = self.steps.stop_after
        self._batch: Any = None

    def _watch_saves(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        save = strategy.save_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: str | Path, *args: object, **kwargs: object) -> None:
            # After an error the other ranks may not answer.
            refuse_unfinite(module, f"checkpoint {filepath}", alone=trainer.interrupted)
            # Gradients of an unfinished window are saved too. With NaN in them, each resumed run would end like this
            # one, unless it may skip the step.
            ends_the_run = self.steps.in_a_row + 1 >= self.steps.stop_after
            if ends_the_run and accumulation_continues(trainer) and not trainer.interrupted:
                self._refuse_bad_window(trainer, filepath)
            save(checkpoint, filepath, *args, **kwargs)

        self._run.callback(patch(strategy, "save_checkpoint", save_checkpoint))

    def _refuse_bad_window(self, trainer: L.Trainer, filepath: str | Path) -> None:
        bad = torch.stack([self.steps.judge(unwrap_optimizer(optimizer))[0] for optimizer in trainer.optimizers])
        if float(bad.amax()) != 0:
            why = "a loss or gradient of this accumulation window is not finite, so its step would end the run"
            way_out = "Check the batch, and resume from the last checkpoint, which is unchanged"
            raise FloatingPointError(explain(f"checkpoint {filepath} was not written", why, way_out))

    def _guard(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> Undo:
        return self.steps.guard_(optimizer, module, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the checkpoint is completely loaded."""
        self.steps.keep_statistics()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: keep the batch, which may have to be named."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._batch = batch

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Hook: each loss, including those of micro-batches."""
        self.steps.note_loss(loss, self._batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: release the batch."""
        # Otherwise the batch stays in memory until the next one arrives.
        self._batch = None

    def _forget(self) -> None:
        super()._forget()
        self.steps.losses, self._batch = [], None

    def _locate(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        """Describe the cause after a bad step. Called on all ranks, which exchange their findings."""
        batch, batch_idx, device = self._batch, self._batch_idx, trainer.strategy.root_device
        # Read on the host: the step was bad, so time does not matter any more.
        bad = next((str(number) for number, loss in self.steps.losses if is_unfinite(loss)), "")
        everyone = gather_values(bad, device)
        layer = ""
        # The same on all ranks: a forward may contain collectives. Earlier batches of a window are not kept, so only a
        # bad loss of the last one can be located. Under manual optimization a repeated step would toggle optimizers.
        can_repeat = module.automatic_optimization and not is_sharded(module)
        if can_repeat and f"{batch_idx}" in everyone:
            layer = first_layer_in_forward(module, lambda: _forward(trainer, module, batch, batch_idx))
        layers = gather_values(layer or last_bad_gradient(module.named_parameters()), device)
        ranks = [rank for rank, number in enumerate(everyone) if number]
        if ranks:
            first = ranks[0]
            where = [f"batch {everyone[first]}", f"rank {first}", layers[first]]
        else:
            where = [f"batch {batch_idx}", "in the backward of a rank", layers[0]]
        return ", ".join([f": epoch {trainer.current_epoch}", *filter(None, where)])


def _forward(trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int) -> None:
    """Run a training step without the strategy's wrapper. All ranks run it, since a layer may communicate."""
    arguments = [batch]
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    with trainer.precision_plugin.train_step_context():
        module.training_step(*arguments)


def _statistics_of(model: nn.Module) -> list[Tensor]:
    """Return buffers that BatchNorm and similar layers update in each forward, even if the step is skipped."""
    norms = modules_of(model, nn.modules.batchnorm._NormBase)
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def is_unfinite(values: object) -> bool:
    """Whether a tensor among ``values`` contains NaN or infinity. Waits for the device."""
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.is_floating_point() and not local_values(value).isfinite().all():
            return True
    return False


def first_layer_in_forward(model: nn.Module, repeat: Callable[[], object]) -> str:
    """Repeat the forward and return the first module whose output is not finite although its inputs are.

    Gradients are not computed, changes that ``repeat`` makes to the model and the random states are undone, and its
    logged values are dropped.

    Args:
        model: the model whose modules are watched.
        repeat: runs the forward.

    Returns:
        Half a sentence for a message.
    """
    found: list[str] = []
    with ExitStack() as undo:
        # The repeated forward changes statistics and random states.
        state = StepState([model])
        undo.callback(state.restore)
        undo.enter_context(state.watch())
        for hook in ("log", "log_dict"):
            if hasattr(model, hook):
                undo.callback(patch(model, hook, lambda *args, **kwargs: None))
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(_note(name, found), with_kwargs=True).remove)
        try:
            # The hooks of inner modules run before those of the modules around them, so the first finding is
            # the innermost module.
            with torch.no_grad():
                repeat()
        except Exception as error:
            # The step itself ran, so only the search for its NaN fails here.
            return f"its layer was not found ({describe_error(error)})"
    return next(iter(found), "the non-finite value could not be reproduced by repeating the forward")


def _note(name: str, found: list[str]) -> Callable[..., None]:
    def look(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if found or not is_unfinite(output):
            return
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        # Only the module's own weights: an inner module's would have been found there.
        own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if is_unfinite((args, kwargs)):
            found.append(f"in the input of {where}")
        elif is_unfinite(list(own)):
            found.append(f"in a weight of {where}")
        else:
            found.append(f"in the output of {where}")

    return look


def last_bad_gradient(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the parameter nearest to the loss whose gradient is not finite, as half a sentence; "" if all are finite.

    The backward passes a NaN on from the loss to the first layers. In models that define their layers in the order of
    the forward, the NaN therefore began in the last-defined of the bad ones. Under ZeRO all ranks take part.
    """
    for name, parameter in reversed(list(named)):
        if is_unfinite(whole_gradient(parameter)):
            return f"in the gradient of {name}"
    return ""
