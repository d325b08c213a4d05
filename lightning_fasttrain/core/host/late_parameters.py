"""Refuse models that cannot train as they are: parameters later than the optimizer, none that trains, or shards."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_fasttrain.core.host.lightning import FabricModule
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import trained_parameters

_WAY_OUT = "Call it first, then make the optimizer, and then call fabric.setup"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class _Late:
    """Parameters of a model that began to train after ``what``, and that no optimizer has stepped yet.

    References are weak, because quantising replaces parameters whose memory must not be kept.
    """

    what: str
    before: list[weakref.ref[nn.Parameter]]
    new: list[weakref.ref[nn.Parameter]]
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)


_changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that are being changed right now
_pending: set[_Late] = set()


@contextmanager
def refuse_late_parameters(model: nn.Module, what: str) -> Iterator[Callable[[], None]]:
    """Refuse an optimizer that lacks the parameters which begin to train inside of this ``with`` block.

    An optimizer that exists is no error yet: it may be one of an earlier training, and step beside another one. It is
    one as soon as it steps a second time while new parameters have gradients and no optimizer has stepped any of them.

    Args:
        model: before it is changed.
        what: changes it, for the message.

    Yields:
        A function that ends the watch, for when the change is undone.

    Raises:
        RuntimeError: Fabric has set the model up, and it has new parameters that train. Later, in the second step of
            an optimizer: it lacks them.
    """
    before = list(map(weakref.ref, model.parameters()))
    trained_before = list(map(weakref.ref, trained_parameters(model)))
    late = _Late(what, before, [])
    _changing.add(model)
    try:
        yield lambda: _pending.discard(late)
    finally:
        _changing.discard(model)
    # Only the living ones, since the id of one that is gone may be used again.
    known = set(map(id, _find_alive(trained_before)))
    late.new = [weakref.ref(parameter) for parameter in trained_parameters(model) if id(parameter) not in known]
    if not late.new:
        return
    if isinstance(model, FabricModule):
        why = f"{len(late.new)} tensors that train now are in no optimizer, and Fabric's strategy has not seen them"
        raise RuntimeError(explain(f"{what} after fabric.setup", why, _WAY_OUT))
    _pending.add(late)
    _listen()


def notices_late_parameters(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorate a function that gives a model parameters to train; inside :func:`apply`, that notices by itself."""

    @functools.wraps(function)
    def call_and_watch(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        if model in _changing:
            return function(model, *args, **kwargs)
        with refuse_late_parameters(model, function.__name__):
            return function(model, *args, **kwargs)

    return call_and_watch


@functools.cache
def _listen() -> None:
    # One hook for the process, since torch is iterating over the hooks when a watch ends.
    register_optimizer_step_pre_hook(_refuse_without_late)


def _refuse_without_late(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Hook: an optimizer is about to step."""
    if not _pending:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for late in list(_pending):
        new = _find_alive(late.new)
        if not new or not held.isdisjoint(map(id, new)):
            _pending.discard(late)
            continue
        training = [parameter for parameter in new if parameter.grad is not None]
        if not training or held.isdisjoint(map(id, _find_alive(late.before))):
            continue
        if optimizer in late.stepped:
            why = f"{len(training)} tensors that train since then are not in it, and no optimizer steps them"
            raise RuntimeError(explain(f"{type(optimizer).__name__} was made before {late.what}", why, _WAY_OUT))
        late.stepped.add(optimizer)


def _find_alive(references: Iterable[Any]) -> list[nn.Parameter]:
    return [parameter for reference in references if (parameter := reference()) is not None]


_WITHOUT_DTENSORS = (DDPStrategy, DeepSpeedStrategy, FabricDDPStrategy, FabricDeepSpeedStrategy)


def refuse_all_frozen(model: nn.Module) -> None:
    """Refuse a model none of whose parameters requires a gradient.

    Raises:
        ValueError: it has parameters, and all are frozen.
    """
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        why = "no parameter requires a gradient, so nothing would be trained"
        way_out = "Unfreeze what you want to train: parameter.requires_grad_(True)"
        raise ValueError(explain(f"{type(model).__name__} has {len(parameters)} parameters", why, way_out))


def refuse_earlier_shards(model: nn.Module, strategy: Any = None) -> None:
    """Refuse a model that an earlier run has left sharded in a form that this run cannot use.

    Args:
        model: before this run shards it.
        strategy: that of this run; None for FSDP2.

    Raises:
        ValueError: ZeRO stage 3 has sharded it and the strategy has another stage or is another one; or FSDP2 has,
            and the strategy is DDP or ZeRO.
    """
    name = "FSDP2Strategy" if strategy is None else type(strategy).__name__
    # Parameters that DeepSpeed has kept whole, since they are small, have hooks of its engine.
    if not getattr(strategy, "zero_stage_3", False) and any(hasattr(p, "ds_id") for p in model.parameters()):
        _refuse_shards("ZeRO stage 3", "ZeROStrategy(stage=3)", name)
    if isinstance(strategy, _WITHOUT_DTENSORS) and any(isinstance(part, FSDPModule) for part in model.modules()):
        _refuse_shards("FSDP2", "FSDP2Strategy()", name)


def _refuse_shards(by: str, usable: str, strategy: str) -> None:
    what = f"{strategy} with a model that is sharded by {by}"
    why = "an earlier run has left it so, and this one cannot use such shards"
    way_out = (
        f"Use {usable} here too, or save a checkpoint in the earlier run, convert it with strategy.consolidate, and "
        f"load it into a new module"
    )
    raise ValueError(explain(what, why, way_out))
