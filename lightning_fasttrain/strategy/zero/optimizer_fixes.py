"""Fixes for DeepSpeed's changes to an optimizer: groups without trained parameters, and an extra first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.state.select_entries import without

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
