"""Update each parameter when its gradient arrives during backward, and free the gradient at once."""

import inspect
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import ClassVar

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import plain_optimizer
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Setting, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep

_LATE_HOOKS = ("on_after_backward", "on_before_optimizer_step")


@check_arguments
def optimize_in_backward_(
    optimizer: Optimizer, *, clip_norm: PositiveFloat | None = None, clip_value: PositiveFloat | None = None
) -> Undo:
    """Let ``optimizer`` update each parameter during ``backward``, so that all gradients never exist at the same time.

    Updates are those of the plain optimizer, bit for bit: the one optimizer steps over one parameter at a time, with
    its own groups and state. A learning-rate scheduler works as before, and ``state_dict`` is interchangeable. The loop
    is unchanged, too: call ``optimizer.step()`` after each ``backward``. It finds no gradients left, and updates only
    other parameters (unfrozen or added since the last step). Step hooks fire there, once a step and after the updates.

    Features that need all gradients at once are not available: accumulation over several ``backward`` calls, clipping
    by the global norm, a loss scaler (it raises in ``step`` or ``update``, as it has seen no gradients), averages over
    processes. If ``backward`` fails midway, some parameters have been updated and others have not: load a checkpoint.

    Args:
        optimizer: any optimizer that treats its parameters independently of their position in a group (bitsandbytes
            uses it for overrides of single parameters); the plain optimizer, or Fabric's wrapper of it.
        clip_norm: largest norm of each parameter's gradient *by itself*. This is not clipping by the global norm, and
            changes training.
        clip_value: largest absolute value of a gradient's entries, as ``clip_grad_value_``; applied first.

    Returns:
        A function that undoes it.

    Raises:
        TypeError: not a torch optimizer.
        ValueError: the optimizer needs a closure (LBFGS); a limit is not positive; there are several processes.
        RuntimeError: in ``backward``: a second gradient for a parameter before ``optimizer.step()``, or an optimizer
            that keeps state for a whole group of parameters (Prodigy, schedule-free ones).

    Example:
        >>> import torch
        >>> net = nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(net.parameters())
        >>> undo = optimize_in_backward_(optimizer)
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> net.weight.grad is None, optimizer.state[net.weight]["step"]
        (True, tensor(1.))
        >>> optimizer.step()

    Source:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
        https://arxiv.org/abs/2306.09782. PyTorch's tutorial creates one optimizer per parameter; here there is one
        optimizer as before, so that its checkpoints and schedulers stay compatible.
    """
    optimizer = plain_optimizer(optimizer)  # hooks and groups belong to it
    _refuse_unfit(optimizer)
    return _InBackward(optimizer, clip_norm, clip_value).undo


class _InBackward:
    """One optimizer that updates during the backward pass."""

    def __init__(self, optimizer: Optimizer, clip_norm: float | None, clip_value: float | None) -> None:
        self.optimizer, self.clip_norm, self.clip_value = optimizer, clip_norm, clip_value
        # the method itself, without torch's wrapper that fires the step hooks
        self.plain_step = inspect.unwrap(type(optimizer).step, stop=lambda step: not hasattr(step, "hooked"))
        # An index, since loading a state replaces the groups.
        self.group_of: dict[Tensor, int] = {}
        self.updated: set[Tensor] = set()  # since the last optimizer.step()
        self.lock = threading.Lock()  # autograd has a thread for each device
        self.hooks = ExitStack()
        self.hooks.callback(optimizer.register_step_post_hook(self.end_step).remove)
        self.hook_parameters()
        if not self.group_of:
            warn(f"optimize_in_backward_: no parameter of {type(optimizer).__name__} requires a gradient so far.")

    def undo(self) -> None:
        self.hooks.close()

    def hook_parameters(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self.group_of:
                    self.hooks.callback(parameter.register_post_accumulate_grad_hook(self.update).remove)
                    self.group_of[parameter] = i

    def end_step(self, *_: object) -> None:
        self.updated.clear()
        self.hook_parameters()  # parameters that were unfrozen or added

    def update(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # applied twice, and the other hook ran first
            return
        with self.lock:
            if parameter in self.updated:
                what = f"a second gradient for a parameter of shape {tuple(parameter.shape)} before optimizer.step()"
                why = "the first was used and freed during backward, so the two cannot be summed"
                way_out = "Call backward once and then optimizer.step(), without gradient accumulation"
                raise RuntimeError(explain(what, why, way_out))
            self.updated.add(parameter)
            if self.clip_value is not None:
                nn.utils.clip_grad_value_(parameter, self.clip_value)
            if self.clip_norm is not None:
                _clip_norm_(parameter, self.clip_norm)
            self.step_over(parameter)
            parameter.grad = None

    def step_over(self, parameter: Tensor) -> None:
        """Run the optimizer's own step with this parameter alone."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        group = groups[self.group_of[parameter]]
        before = dict(group)
        # The group itself rather than a copy, so that changes by a step are detected below, and kept.
        optimizer.param_groups, group["params"] = [group], [parameter]
        try:
            self.plain_step(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, before["params"]
        refuse_changed_group(optimizer, before, group)


def refuse_changed_group(optimizer: Optimizer, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Refuse an optimizer that has changed settings of a group in a step over one of its parameters.

    Raises:
        RuntimeError: names the settings.
    """
    changed = [key for key in after if key != "params" and after[key] is not before.get(key)]
    if changed:
        what = f"{type(optimizer).__name__} changed its group's {', '.join(changed)} in a step"
        why = "it updates per-group state once per parameter, but the group shares one value"
        raise RuntimeError(explain(what, why, "Use an optimizer without per-group state, such as AdamW"))


def _clip_norm_(parameter: Tensor, limit: float) -> None:
    if parameter.grad is None or not parameter.grad.is_sparse:
        nn.utils.clip_grad_norm_(parameter, limit)
        return
    # torch has no norm of sparse gradients (of embeddings); this applies its formula to their values.
    parameter.grad = parameter.grad.coalesce()
    entries = parameter.grad.values()
    entries.mul_((limit / (entries.norm() + 1e-6)).clamp(max=1.0))


def _refuse_unfit(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    try:
        # A step that can be called without a closure.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        why = "its step takes a closure, to run backward itself"
        raise ValueError(explain(f"{name} in backward", why, "Use one such as AdamW")) from None
    if rank_count() > 1:
        why = "parameters would be updated before their gradients are averaged over the processes"
        way_out = "Train on one device, or shard the gradients (ZeRO, FSDP)"
        raise ValueError(explain(f"{name} in backward on {rank_count()} processes", why, way_out))


class OptimizerInBackward(Technique):
    """Update each parameter during the backward pass, as its gradient arrives, and free the gradient at once.

    The peak is lower by one full set of gradients where activations are smaller than gradients (small batches,
    :class:`~lightning_fasttrain.ActivationCheckpointing`), and unchanged where activations alone make the peak. Steps
    take a little longer, since the optimizer is called once per parameter. For automatic optimization on one device;
    the Trainer's clipping by value, ``global_step``, schedulers, checkpoints and resuming work as usual.

    Acts on the optimizer from ``on_fit_start``, the first hook at which it exists. Code that reads gradients after the
    backward pass (``on_after_backward``, ``on_before_optimizer_step``, loggers of their norm) finds none, and runs
    after the update: a learning rate set there applies from the next step.

    Args:
        clip_norm: largest norm of each parameter's gradient by itself. Without it the training is the same, bit for
            bit; with it, it differs from training without clipping, and from clipping by the global norm.

    Raises:
        ValueError: ``clip_norm`` is not positive; in ``fit``: manual optimization, accumulation, clipping by norm or by
            a custom ``configure_gradient_clipping``, a loss scaler (float16), a strategy for several devices.

    Example:
        >>> in_backward = OptimizerInBackward()

    Source:
        See :func:`~lightning_fasttrain.optim.optimize_in_backward_`.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.UPDATES_IN_BACKWARD})
    effect: ClassVar[str] = "each gradient is used and freed when it arrives, so they are never all in memory"
    when: ClassVar[str] = (
        "gradients are a large share of the peak, on one device; not with clipping by norm or gradient accumulation"
    )
    in_a_loop: ClassVar[str] = "optim.optimize_in_backward_(optimizer)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("gradients", "in backward"),)
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "each gradient is used and freed during backward, so it cannot be summed over"
        way_out = "Use one of them; ActivationCheckpointing saves activations together with OptimizerInBackward"
        return (
            Conflict(Capability.SPLITS_BATCHES, f"{why} micro-batches", way_out),
            Conflict(Capability.SUMS_BATCHES, f"{why} batches", "Use one of them"),
            Conflict(
                GradientAccumulationScheduler,
                f"{why} batches",
                "Use one of them",
                lambda _, scheduler: max(scheduler.scheduling.values()) > 1,
            ),
        )

    def __init__(self, clip_norm: PositiveFloat | None = None) -> None:
        self.clip_norm = clip_norm
        if clip_norm is not None:
            self.exactness = Exactness.CHANGES_TRAINING

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.devices > 1:
            return "the strategy averages or shards the gradients, so they must stay"
        if facts.accumulates is not None and facts.accumulates > 1:
            return f"gradients are accumulated over {facts.accumulates} batches, so they must stay"
        if facts.clips == "norm":
            return "the Trainer clips by the norm of all gradients, which never exist at the same time"
        return None

    def predict(self, step: PredictedStep) -> None:
        step.on_optimizer.append(lambda optimizer: optimize_in_backward_(optimizer, clip_norm=self.clip_norm))

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_settings(trainer, pl_module)
        _warn_of_late_hooks(trainer, pl_module)
        self._in_backward = ExitStack()
        self._in_backward.callback(_clip_what_is_left_(trainer.precision_plugin))
        return self._in_backward.close

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first one at which the optimizer exists; its state is restored later, into the same object."""
        # Clipping by norm was refused before, so this is a value.
        clip_value = trainer.gradient_clip_val or 0
        undo = optimize_in_backward_(
            trainer.optimizers[0], clip_norm=self.clip_norm, clip_value=clip_value if clip_value > 0 else None
        )
        self._in_backward.callback(undo)


def _clip_what_is_left_(precision: Precision) -> Undo:
    """Skip ``clip_grad_value_`` where there is no gradient at all, the usual case here, in which it fails."""
    original = precision.clip_grad_by_value

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in precision.main_params(optimizer)):
            original(optimizer, clip_val)

    return patch(precision, "clip_grad_by_value", clip_grad_by_value)


def _warn_of_late_hooks(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Warn where the user's code may change gradients after they are used, which has no effect."""
    for owner in (module, *trainer.callbacks):
        kind = type(owner)
        is_users = kind.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_fasttrain")
        base = L.LightningModule if owner is module else L.Callback
        late = [name for name in _LATE_HOOKS if getattr(kind, name) is not getattr(base, name)]
        if is_users and late:
            why = "gradients have been used and freed before it is called, so what it does to them has no effect"
            way_out = "Use hooks of the parameters, torch.Tensor.register_hook, or remove OptimizerInBackward"
            warn(explain(f"OptimizerInBackward with {late[0]} of {kind.__name__}", why, way_out))


def _refuse_settings(trainer: L.Trainer, module: L.LightningModule) -> None:
    clip, algorithm = trainer.gradient_clip_val or 0, trainer.gradient_clip_algorithm
    unfit = [
        (
            not module.automatic_optimization,
            "automatic_optimization=False",
            "the module steps its optimizers itself, and there may be several",
            "Call optimize_in_backward_(optimizer) in on_fit_start, and the function it returns in on_fit_end",
        ),
        (
            trainer.accumulate_grad_batches > 1,
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "each gradient is used and freed during backward, so it cannot be accumulated",
            "Use accumulate_grad_batches=1, or remove OptimizerInBackward",
        ),
        (
            clip > 0 and algorithm != "value",
            f"gradient_clip_val={clip} by norm",
            "the norm of all gradients requires all of them, which never exist at the same time",
            f"Use gradient_clip_algorithm='value', or OptimizerInBackward(clip_norm={clip}) instead, which clips each "
            "parameter's gradient by its own norm",
        ),
        (
            is_overridden("configure_gradient_clipping", module),
            f"configure_gradient_clipping of {type(module).__name__}",
            "it is called after the gradients have been freed",
            "Use Trainer(gradient_clip_algorithm='value') or OptimizerInBackward(clip_norm=...)",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r}",
            "its loss scaler unscales the gradients before the step, when they have been freed",
            "Use precision='bf16-mixed'",
        ),
        (
            not isinstance(trainer.strategy, SingleDeviceStrategy),
            type(trainer.strategy).__name__,
            "it owns the gradients, to average or shard them over devices",
            "Train on one device (devices=1, strategy='auto'), or remove OptimizerInBackward",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(f"OptimizerInBackward with {what}", why, way_out))
