"""Parameters that came after the optimizer was made, and that nothing would ever step."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import compress
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.host.lightning import FabricModule
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import trained_parameters

_WAY_OUT = "Call it first, then make the optimizer, and then call fabric.setup"

P = ParamSpec("P")
R = TypeVar("R")


class LateParameters:
    """Notices that a model has new parameters to train while its optimizer was made before them.

    That an optimizer exists is no error yet: it may be one of an earlier training. It is one as soon as it steps while
    new parameters have gradients and no optimizer has any of them. Until then this costs one look at a gradient a
    step, of these optimizers only; afterwards an empty call.

    Args:
        model: before it is changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Weakly, because quantising replaces parameters whose memory must not be kept.
        self.before = list(map(weakref.ref, model.parameters()))
        self.trained_before = list(map(weakref.ref, trained_parameters(model)))
        self.new: list[Any] = []
        self.hooks = ExitStack()

    def __enter__(self) -> None:
        _noticed.add(self.model)

    def __exit__(self, *error: object) -> None:
        _noticed.discard(self.model)

    def watch(self, what: str) -> ExitStack:
        """After the change: refuse it, or watch the optimizers that exist.

        Args:
            what: was done, for the message.

        Returns:
            What ends the watch.

        Raises:
            RuntimeError: Fabric has set the model up, and it has new parameters that train. Later, in the first step
                of an optimizer: it was made before them.
        """
        # Only the living ones, since the id of one that is gone may be used again.
        known = set(map(id, _find_alive(self.trained_before)))
        new = [parameter for parameter in trained_parameters(self.model) if id(parameter) not in known]
        if not new:
            return self.hooks
        if isinstance(self.model, FabricModule):
            why = f"{len(new)} tensors that train now are in no optimizer, and Fabric's strategy has not seen them"
            raise RuntimeError(explain(f"{what} after fabric.setup", why, _WAY_OUT))
        self.what, self.new = what, list(map(weakref.ref, new))
        for optimizer in _holders(_find_alive(self.before)):
            self.hooks.callback(optimizer.register_step_pre_hook(self._check).remove)
        return self.hooks

    def _check(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Hook: an optimizer from before is about to step."""
        training = [parameter for parameter in _find_alive(self.new) if parameter.grad is not None]
        if not training:
            return
        if not _holders(training):
            why = f"{len(training)} tensors that train since then are in no optimizer, so they would never move"
            raise RuntimeError(explain(f"{type(optimizer).__name__} was made before {self.what}", why, _WAY_OUT))
        # The hook stays, with nothing to ask, since torch is iterating over the hooks.
        self.new = []


def notices_late_parameters(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorate a function that gives a model parameters to train; inside :func:`apply`, that notices by itself."""

    @functools.wraps(function)
    def call_and_watch(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        if model in _noticed:
            return function(model, *args, **kwargs)
        late = LateParameters(model)
        with late:
            result = function(model, *args, **kwargs)
        late.watch(function.__name__)
        return result

    return call_and_watch


_noticed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that are being changed right now


def _find_alive(references: Iterable[Any]) -> list[nn.Parameter]:
    return [parameter for reference in references if (parameter := reference()) is not None]


def _holders(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers of this process that have one of these parameters. Torch keeps no list of optimizers."""
    wanted = set(map(id, parameters))
    kinds, things = set(map(id, _subclasses_of(Optimizer))), gc.get_objects()
    # By the id of the type: some proxies answer isinstance by running code, and some types have no hash. No loop in
    # Python, since there can be a million objects.
    optimizers = compress(things, map(kinds.__contains__, map(id, map(type, things))))
    return [optimizer for optimizer in optimizers if wanted.intersection(map(id, _parameters_of(optimizer)))]


def _subclasses_of(kind: type[object]) -> set[type[Any]]:
    """The class itself, and all that inherit from it."""
    return {kind}.union(*map(_subclasses_of, kind.__subclasses__()))


def _parameters_of(optimizer: Optimizer) -> list[Any]:
    # An optimizer whose __init__ has raised may still be in memory, without groups.
    return [parameter for group in vars(optimizer).get("param_groups", ()) for parameter in group["params"]]
