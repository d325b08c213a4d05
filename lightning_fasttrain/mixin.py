"""A mixin with which a ``LightningModule`` brings its techniques along."""

import difflib
import functools
from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import torch
from torch import nn

from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import ADAPTERS, adding_techniques, complete_state
from lightning_fasttrain.optim import NamedOptimizer
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.technique import apply, is_operated_on, list_techniques

_READ = ("techniques", "configure_techniques")  # names in a class that the mixin reads


class FastTrainMixin:
    """A ``LightningModule`` that names its own techniques; any Trainer that fits it uses them.

    Name them in ``techniques``, or build them in :meth:`configure_techniques`. They are handed over through
    Lightning's own ``configure_callbacks``; a ``configure_callbacks`` of your own keeps working beside it, with or
    without ``super()``. Nobody asks a module in a Fabric or bare loop, or inside another one: its first forward in
    training then warns, and says what to call.

    Name the optimizer in ``optimizer``, here or in ``__init__``, where it can come from a YAML file; then no
    ``configure_optimizers`` is needed.

    Raises:
        TypeError: the mixin comes after the LightningModule in the list of bases, whose hook would hide its own; or the
            class has techniques under a misspelled name, such as ``technique``.

    Example:
        >>> import lightning as L
        >>> import lightning_fasttrain as ft
        >>> class Net(ft.FastTrainMixin, L.LightningModule):
        ...     techniques = [ft.MicroBatching(4)]
        ...     optimizer = ft.optim.NamedOptimizer("adamw", lr=1e-3)
        >>> [type(callback).__name__ for callback in Net().configure_callbacks()]
        ['MicroBatching']
    """

    techniques: Sequence[Technique] = ()
    optimizer: NamedOptimizer | None = None
    _looked = False

    def configure_techniques(self) -> Sequence[Technique]:
        """The techniques to use; override where they depend on the module's arguments."""
        return self.techniques

    def configure_callbacks(self) -> list[L.Callback]:
        """Hook: served to the Trainer before it sets anything up."""
        return _with_techniques(self, super().configure_callbacks())  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        """Hook: builds the optimizer that is named; where none is, the next class in line does."""
        if isinstance(self.optimizer, NamedOptimizer):  # classes below may keep another thing of this name
            return self.optimizer(cast(nn.Module, self))
        following: Any = super()
        # Lightning's own would return None and, after a warning, train without an optimizer.
        if following.configure_optimizers.__func__ is L.LightningModule.configure_optimizers:
            what = f"{type(self).__name__} names no optimizer and has no configure_optimizers"
            way_out = "Set optimizer = ft.optim.NamedOptimizer('adamw', lr=1e-3) in the class"
            raise ValueError(explain(what, "nothing would be trained", way_out))
        return following.configure_optimizers()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Hook: ``load_from_checkpoint`` of a run with adapters adds them before it loads their values."""
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        module = cast(nn.Module, self)
        if ADAPTERS not in checkpoint or trainer_of(module) is not None:  # a Trainer has its techniques add them
            return
        techniques = adding_techniques(self.configure_techniques())
        if techniques:
            apply(module, techniques)
            checkpoint["state_dict"] = complete_state(module, checkpoint)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        # A hook on the module would stand in the way of torch.jit.script.
        # Techniques are for training: a forward in evaluation, or without gradients, is no sign that they are missed.
        if not self._looked and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._looked = True
            _warn_if_unused(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_hidden(cls)
        _refuse_misspelled(cls)
        own = cls.__dict__.get("configure_callbacks")
        if own is not None:

            @functools.wraps(own)
            def configure_callbacks(self: FastTrainMixin) -> list[L.Callback]:
                techniques = list(self.configure_techniques())
                restore = patch(self, "configure_techniques", lambda: techniques)  # `own` may ask again, by super()
                try:
                    return _with_techniques(self, own(self))
                finally:
                    restore()

            cls.configure_callbacks = configure_callbacks


def _warn_if_unused(module: FastTrainMixin) -> None:
    if is_operated_on(module):
        return
    idle = [technique for technique in module.configure_techniques() if not technique.acting]
    if not idle:
        return
    name = type(module).__name__
    ways = ", ".join(f"{type(technique).__name__}: {technique.in_a_loop}" for technique in idle)
    why = f"only a Trainer that fits {name} itself uses them"
    warn(explain(f"the techniques of {name} do nothing here", why, f"In a Fabric or bare loop use {ways}"))


def _refuse_hidden(cls: type) -> None:
    order = cls.__mro__
    if nn.Module in order and order.index(nn.Module) < order.index(FastTrainMixin):
        bases = [base.__name__ for base in cls.__bases__]
        right = sorted(cls.__bases__, key=lambda base: issubclass(base, nn.Module))  # stable: each half keeps its order
        why = "LightningModule's configure_callbacks comes before the mixin's, so no technique would be used"
        way_out = f"Turn the bases round: class {cls.__name__}({', '.join(base.__name__ for base in right)})"
        raise TypeError(explain(f"class {cls.__name__}({', '.join(bases)})", why, way_out))


def _refuse_misspelled(cls: type) -> None:
    """Refuse names like ``technique`` that nothing would read, so that no technique would be used."""
    for name, value in vars(cls).items():
        meant = difflib.get_close_matches(name, _READ, n=1, cutoff=0.9)
        if name in _READ or not meant:
            continue
        listed = value if isinstance(value, list | tuple) else [value]
        if callable(value) or any(isinstance(one, Technique) for one in listed):
            why = "nothing reads this name, so no technique would be used"
            raise TypeError(explain(f"class {cls.__name__} has {name}", why, f"Call it {meant[0]}"))


def _with_techniques(module: FastTrainMixin, callbacks: Sequence[L.Callback] | L.Callback | None) -> list[L.Callback]:
    listed = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or [])
    # By identity: two that are equal but not the same object are a mistake of the user's, which check_together reports.
    there = {id(callback) for callback in listed}
    missing = [technique for technique in list_techniques(module.configure_techniques()) if id(technique) not in there]
    return [*listed, *missing]
