"""An engine of DeepSpeed: hooks can be removed, gradients scaled, and errors of saves reported."""

import argparse
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fasttrain.core.host.deepspeed import import_deepspeed
from lightning_fasttrain.core.host.optimizer_steps import gradient_norm
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.parameters import gradients_of, trained_parameters
from lightning_fasttrain.core.modules.wrapped_forward import patch, patched
from lightning_fasttrain.core.state.values import only, without
from lightning_fasttrain.finetune.selection.float32_adapters import let_round_
from lightning_fasttrain.optim.build_schedule import Schedule, count_by_engine

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_post_accumulate_grad_hooks",  # of parameters
)


class _AddedHooks(NamedTuple):
    """Kinds and keys of the hooks that an engine of DeepSpeed has added to a module or parameter."""

    engine: weakref.ref[nn.Module]
    hooks: set[tuple[str, int]]


_ADDED = WeakIdKeyDictionary()  # module or parameter → its _AddedHooks


def refuse_half_on_cpu(precision: str, device_type: str) -> None:
    """Refuse float16 where DeepSpeed has no kernels for it.

    Raises:
        ValueError: ``"16-mixed"`` or ``"16-true"`` on a CPU.
    """
    if device_type == "cpu" and precision in ("16-mixed", "16-true"):
        way_out = f"Use precision={precision.replace('16', 'bf16')!r}, which runs on GPUs too"
        raise ValueError(explain(f"precision={precision!r} on a CPU", "DeepSpeed has no float16 there", way_out))


def make_broadcastable_(model: nn.Module) -> None:
    """Make parameters of other memory layouts contiguous, as of channels_last: DeepSpeed broadcasts their bytes.

    Raises:
        ValueError: a parameter has no dimension, such as CLIP's ``logit_scale``.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            why = "DeepSpeed cannot broadcast a parameter without a dimension"
            way_out = "Give it the shape (1,), or use FSDP2Strategy(), which replicates it"
            raise ValueError(explain(f"parameter '{name}' of shape ()", why, way_out))
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


class Engine:
    """DeepSpeed engine whose hooks can be removed from the model, and whose gradients can be scaled.

    Args:
        config: DeepSpeed config.
        model: the user's module.
        optimizer: the user's optimizer; None for evaluation, or where the config describes one.
        scheduler: learning-rate scheduler that DeepSpeed steps, if any.
        device_rank: index of this rank's device.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        device_rank: int,
    ) -> None:
        _destroy_engines_of(model)  # of another Trainer: their hooks would run in addition
        # To distinguish DeepSpeed's hooks from the user's afterwards.
        before = {id(holder): _hooks(holder) for holder in _holders(model)}
        self.module = model
        if any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")):
            # DeepSpeed requires one dtype, and updates its own float32 copies.
            let_round_(model)
        deepspeed = import_deepspeed()
        trained: list[nn.Parameter] = []
        self._schedules: list[Schedule] = []
        self._skipped = 0
        is_training = optimizer is not None or "optimizer" in config
        if optimizer is not None:
            self._schedules = count_by_engine(optimizer)
            leave_out_idle_groups(optimizer, scheduler)
        if is_training:
            trained = trained_parameters(model)
        with without_phantom_step():
            self.deepspeed, self.optimizer, _, self.scheduler = deepspeed.initialize(
                args=argparse.Namespace(device_rank=device_rank),
                config=config,
                model=model,
                model_parameters=trained,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                dist_init_required=False,
            )
        if self.optimizer is optimizer:
            # At stage 0 in float32 the user's optimizer is stepped itself, so its hooks report the updates.
            for schedule in self._schedules:
                schedule.engine_reports = False
            self._schedules = []
        for holder in _holders(model):
            new = _hooks(holder) - before.get(id(holder), set())
            _ADDED[holder] = _AddedHooks(weakref.ref(self.deepspeed), new)
        self._windows = 0
        if is_training:
            # DeepSpeed must not count batches: outside of a window each backward is the last before a step.
            self.deepspeed.set_gradient_accumulation_boundary(True)

    def end_training(self) -> None:
        """Drop DeepSpeed's references to the model that would keep it in memory; the engine can still be saved.

        They are in a list and a cache of its own, and in hooks of parameters, where the garbage collector does not see
        that they belong to the model.
        """
        _remove_hooks(self.module.parameters())
        _drop_references(self.module)

    def release(self) -> None:
        """Destroy the engine, and remove DeepSpeed's hooks from the model; other hooks stay."""
        _destroy_engines_of(self.module)

    @contextmanager
    def save_only(self, names: set[str]) -> Iterator[bool]:
        """Restrict the saved module to these keys in this context; yield whether that is only a part of the module."""
        state_dict = self.module.state_dict

        def state_of_part(*args: object, **kwargs: object) -> dict[str, Any]:
            return only(state_dict(*args, **kwargs), names)

        if names >= set(state_dict()):
            yield False
            return
        with patched(self.module, "state_dict", state_of_part):
            yield True

    @contextmanager
    def load_only(self, names_to_load: Callable[[Any, set[str], bool], set[str]]) -> Iterator[None]:
        """Allow a loaded checkpoint to lack keys of the module that ``names_to_load`` does not return."""
        load = self.deepspeed.load_module_state_dict

        def load_part(checkpoint: dict[str, Any], strict: bool = True, **kwargs: object) -> None:
            names = names_to_load(checkpoint, set(checkpoint["module"]), strict)
            load(checkpoint=checkpoint, strict=strict and names >= set(self.module.state_dict()), **kwargs)

        with patched(self.deepspeed, "load_module_state_dict", load_part):
            yield

    @contextmanager
    def save_alone(self) -> Iterator[None]:
        """Disable the barriers in DeepSpeed's save in this context, so that a rank that cannot write can report it.

        Call :meth:`end_saving` when all ranks have agreed.

        Raises:
            OSError: a file could not be written.
        """
        from deepspeed import comm

        write = self.deepspeed.checkpoint_engine.save

        def save(*args: object, **kwargs: object) -> None:
            try:
                write(*args, **kwargs)
            except RuntimeError as error:  # torch.save raises it for a full disk
                raise OSError(f"a file of the checkpoint could not be written: {error}") from error

        with ExitStack() as undo:
            undo.callback(patch(self.deepspeed.checkpoint_engine, "save", save))
            undo.callback(patch(comm, "barrier", lambda *args, **kwargs: None))
            undo.callback(patch(self.deepspeed, "_checkpoint_tag_validation", lambda tag: None))
            if self._gathers_after_saving():
                undo.callback(patch(self.deepspeed.optimizer, "checkpoint_event_epilogue", lambda: None))
            yield

    def end_saving(self) -> None:
        """Gather the parameters again that stage 3 keeps unsharded; a collective."""
        if self._gathers_after_saving():
            self.deepspeed.optimizer.checkpoint_event_epilogue()

    def _gathers_after_saving(self) -> bool:
        return hasattr(self.deepspeed.optimizer, "checkpoint_event_epilogue")

    @contextmanager
    def inside_window(self) -> Iterator[None]:
        """Accumulate the backward passes in this context, which no optimizer step follows. Can be nested."""
        self._windows += 1
        self.deepspeed.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._windows -= 1
            self.deepspeed.set_gradient_accumulation_boundary(self._windows == 0)
            self._end_backward()

    def _end_backward(self) -> None:
        """Make stage 3 end the backward pass now, instead of in the engine's next forward.

        Under manual optimization there may be no forward before the next backward, which would overwrite the gradient.
        """
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        if isinstance(self.deepspeed.optimizer, ZeROOptimizer):
            self.deepspeed.optimizer.clear_backward_seen_flag()

    def scale_gradients_(self, factor: Tensor | float) -> None:
        """Multiply the gradients of the coming step by ``factor``, before their norm is taken and clipped.

        ZeRO's optimizers divide gradients by the loss scale when they use them, on the device or offloaded; therefore
        the loss scale is changed for one step.
        """
        sharded = self._sharded_optimizer()
        if sharded is None:
            grads = gradients_of(self.module.parameters())
            if grads:
                torch._foreach_mul_(grads, torch.as_tensor(factor, device=grads[0].device))
            return
        if isinstance(factor, Tensor) and _is_offloaded(sharded):
            # Gradients on the host cannot be multiplied by a tensor on the device.
            factor = float(factor)
        previous = sharded.loss_scale
        # Gradients are divided by the scale: infinity makes them 0.
        scale = previous / factor if isinstance(factor, Tensor) or factor != 0 else float("inf")
        sharded.custom_loss_scaler, sharded.external_loss_scale = True, scale

    def end_step(self) -> None:
        """Reset the scale of :meth:`scale_gradients_` after an optimizer step, and advance the schedules."""
        sharded = self._sharded_optimizer()
        if sharded is not None:
            sharded.custom_loss_scaler, sharded.external_loss_scale = False, None
        # A step with an overflow is skipped, so schedules do not advance.
        skipped, self._skipped = self._skipped, self.deepspeed.skipped_steps
        for schedule in self._schedules:
            if skipped == self._skipped:
                schedule.end_update()

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the coming step's gradient over all ranks."""
        sharded = self._sharded_optimizer()
        if sharded is None:
            return torch.nn.utils.get_total_norm(gradients_of(self.module.parameters()))
        return gradient_norm(sharded)

    def _sharded_optimizer(self) -> Any:
        """Return ZeRO's optimizer of stage 1 to 3; None at stage 0, where parameters hold their own gradients."""
        if self.optimizer is None or self.deepspeed.zero_optimization_stage() == 0:
            return None
        optimizer = self.deepspeed.optimizer
        if not hasattr(optimizer, "external_loss_scale"):
            why = "this DeepSpeed optimizer has no loss scale"
            way_out = "Use another stage, or leave data_types.grad_accum_dtype out of the config"
            raise ValueError(explain(f"scaling the gradients of {type(optimizer).__name__}", why, way_out))
        return optimizer


def _is_offloaded(sharded: object) -> bool:
    return bool(getattr(sharded, "cpu_offload", False) or getattr(sharded, "offload_optimizer", False))


def _holders(model: nn.Module) -> list[nn.Module | nn.Parameter]:
    return [*model.modules(), *model.parameters()]


def _hooks(holder: nn.Module | nn.Parameter) -> set[tuple[str, int]]:
    return {(kind, key) for kind in _HOOKS for key in getattr(holder, kind, None) or ()}


def _remove_hooks(holders: Iterable[nn.Module | nn.Parameter]) -> None:
    for holder in holders:
        if holder in _ADDED:
            for kind, key in _ADDED[holder].hooks:
                getattr(holder, kind).pop(key, None)


def _destroy_engines_of(model: nn.Module) -> None:
    """Destroy the engines that have hooks on parts of the model, and remove these hooks."""
    holders = _holders(model)
    _remove_hooks(holders)
    engines = {_ADDED.pop(holder).engine() for holder in holders if holder in _ADDED}
    for engine in engines - {None}:
        engine.destroy()
        # Its destructor would do so again at any time, and clear what a later engine keeps on the same parameters.
        engine.destroy = lambda: None
        _drop_references(engine.module)


def _drop_references(module: nn.Module) -> None:
    """Drop the references to a model that DeepSpeed's stage 3 keeps in module-level variables."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    if module in FWD_MODULE_STACK:
        FWD_MODULE_STACK.remove(module)
    # A cache of all engines, which fill it again. The method is a function around the cached one.
    method = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


Group = dict[str, Any]


class AllGroups:
    """View of an optimizer for its schedule, which includes the parameter groups that DeepSpeed drops.

    Args:
        optimizer: the optimizer with the remaining groups.
        idle: index → group without trained parameters.
    """

    def __init__(self, optimizer: Optimizer, idle: dict[int, Group]) -> None:
        self._optimizer, self._idle = optimizer, idle

    @property
    def param_groups(self) -> list[Group]:
        """All groups in order; looked up each time, since loading a checkpoint replaces the dicts."""
        groups = list(self._optimizer.param_groups)
        for place, group in sorted(self._idle.items()):
            groups.insert(place, group)
        return groups

    @property
    def __class__(self) -> type:  # LearningRateMonitor names learning rates by it
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_idle"):  # not set yet while a copy is made
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def leave_out_idle_groups(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Remove groups without trained parameters from the optimizer; the schedule continues to include them.

    DeepSpeed drops empty groups, and fails on groups with frozen parameters only; a schedule has a learning rate for
    each group.

    Raises:
        ValueError: a schedule exists for the optimizer, but ``scheduler`` is None.
    """
    idle = {i: group for i, group in enumerate(optimizer.param_groups) if not _trains(group)}
    if not idle or len(idle) == len(optimizer.param_groups):
        return
    places = ", ".join(map(str, idle))
    # Torch marks the step of an optimizer that has a schedule by this attribute.
    if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        why = "DeepSpeed drops such groups, but the schedule that was made for this optimizer includes them"
        way_out = "Leave the group out, or give the schedule too: fabric.setup(model, optimizer, scheduler=schedule)"
        raise ValueError(explain(f"parameter group {places} under ZeRO, in which nothing trains", why, way_out))
    note_once(f"ZeRO: nothing trains in parameter group {places}, so it is removed from the optimizer")
    optimizer.param_groups[:] = [group for i, group in enumerate(optimizer.param_groups) if i not in idle]
    if scheduler is not None:
        _follow(scheduler, AllGroups(optimizer, idle))


def _trains(group: Group) -> bool:
    return any(parameter.requires_grad for parameter in group["params"])


def _follow(scheduler: LRScheduler, optimizer: AllGroups) -> None:
    scheduler.optimizer = optimizer
    # SequentialLR and ChainedScheduler hold further schedules.
    for part in getattr(scheduler, "_schedulers", ()):
        _follow(part, optimizer)


def refuse_replaced(optimizer: Optimizer) -> None:
    """Refuse an Adagrad with groups or settings, which DeepSpeed replaces by one with the defaults and one group.

    Raises:
        ValueError: the Adagrad has several groups, settings of a group, or a schedule.
    """
    if not isinstance(optimizer, Adagrad):
        return
    settings = []
    for group in optimizer.param_groups:
        settings.append(without(group, ["params"]))
    if settings != [optimizer.defaults]:
        what = f"{type(optimizer).__name__} with several groups, settings of a group or a schedule under ZeRO"
        why = "DeepSpeed replaces it by another one, which ignores groups and schedule"
        raise ValueError(explain(what, why, "Use RMSprop or AdamW, or stage=0"))


@contextmanager
def without_phantom_step() -> Iterator[None]:
    """Leave the optimizer's state to be initialized by its first step, while an engine is created.

    In 16 bits without sharding, DeepSpeed initializes the state by a step with zero gradients: Adam would count one
    step too many from then on, and weights would be decayed.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    name = "initialize_optimizer_states"
    with patched(FP16_Optimizer, name, lambda self: None), patched(FP16_UnfusedOptimizer, name, lambda self: None):
        yield
