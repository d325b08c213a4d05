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
# The critic of a GAN commonly takes five steps for one of the generator, which may have the new parameters.
_STEPS = 10
_STEPS_IN_VAIN = 2  # of an optimizer all of whose parameters are frozen; a new one may step after it

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class _Late:
    """Parameters of a model that began to train after ``what``, and that no optimizer has stepped yet.

    Those of the model are held by name: torch swaps a sharded parameter only if no weak reference to it exists. The
    replaced ones are held weakly, because quantising replaces parameters whose memory must not be kept.
    """

    what: str
    model: weakref.ref[nn.Module]
    new: set[str] = field(default_factory=set)
    replaced: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    steps: weakref.WeakKeyDictionary[Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)


_changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that are being changed right now
_pending: set[_Late] = set()


@contextmanager
def refuse_late_parameters(model: nn.Module, what: str) -> Iterator[Callable[[], None]]:
    """Refuse an optimizer that lacks the parameters which begin to train inside of this ``with`` block.

    An optimizer that exists is not an error yet: it may belong to an earlier training, or step beside another one. It
    is one when it steps while new parameters have gradients and no optimizer has stepped any of them: for the
    second time if it cannot train anything any more, since its parameters were frozen or replaced; else for the tenth.

    Args:
        model: before it is changed.
        what: changes it, for the message.

    Yields:
        A function that ends the watch, for when the change is undone.

    Raises:
        RuntimeError: Fabric has set the model up, and it has new parameters that train. Later, in the tenth step of
            an optimizer, or in the second of one that trains nothing: it lacks them.
    """
    before = list(map(weakref.ref, model.parameters()))
    trained_before = list(map(weakref.ref, trained_parameters(model)))
    late = _Late(what, weakref.ref(model))
    _changing.add(model)
    try:
        yield lambda: _pending.discard(late)
    finally:
        _changing.discard(model)
    # Only the living ones, since the id of one that is gone may be used again.
    known = set(map(id, _find_alive(trained_before)))
    late.new = {name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known}
    if not late.new:
        return
    present = set(map(id, model.parameters()))
    late.replaced = [weakref.ref(parameter) for parameter in _find_alive(before) if id(parameter) not in present]
    if isinstance(model, FabricModule):
        why = f"{len(late.new)} tensors that train now are in no optimizer, and Fabric's strategy has not seen them"
        raise RuntimeError(explain(f"{what} after fabric.setup", why, _WAY_OUT))
    _pending.add(late)
    _listen()


def refuse_late_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of a run that were all made before parameters which train, without waiting for their steps.

    Args:
        model: that the run trains.
        optimizers: all of the run.

    Raises:
        RuntimeError: none of them holds a new parameter, and one holds earlier ones.
    """
    parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for late in list(_pending):
        named = dict(model.named_parameters())
        new = [named.pop(name) for name in late.new if name in named]
        if late.model() is not model or not new or not parameters.keys().isdisjoint(map(id, new)):
            continue
        if not parameters.keys().isdisjoint(map(id, [*named.values(), *_find_alive(late.replaced)])):
            why = f"{len(new)} tensors that train since then are not in it, and no optimizer would step them"
            way_out = "Make the optimizer in configure_optimizers, which is called after it"
            raise RuntimeError(explain(f"an optimizer was made before {late.what}", why, way_out))


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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = set(map(id, parameters))
    for late in list(_pending):
        model = late.model()
        named = {} if model is None else dict(model.named_parameters())
        new = [named.pop(name) for name in late.new if name in named]
        if not new or not held.isdisjoint(map(id, new)):
            _pending.discard(late)
            continue
        training = [parameter for parameter in new if parameter.grad is not None]
        replaced = _find_alive(late.replaced)
        before = [*named.values(), *replaced]
        if not training or held.isdisjoint(map(id, before)):
            continue
        steps = late.steps.get(optimizer, 0) + 1
        gone = set(map(id, replaced))
        trains_any = any(parameter.requires_grad and id(parameter) not in gone for parameter in parameters)
        if steps >= (_STEPS if trains_any else _STEPS_IN_VAIN):
            why = f"{len(training)} tensors that train since then are not in it, and no optimizer steps them"
            raise RuntimeError(explain(f"{type(optimizer).__name__} was made before {late.what}", why, _WAY_OUT))
        late.steps[optimizer] = steps


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
