"""Replace the ``forward`` of modules so that it can be undone, patch other attributes, and switch dropout off."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_fasttrain.core.messages import number_of
from lightning_fasttrain.core.modules.select import class_if_imported

Undo = Callable[[], None]


def undo_all(undos: Iterable[Undo]) -> Undo:
    """Return a function that undoes several changes, the last one first.

    Example:
        >>> undo = undo_all([lambda: print("first change"), lambda: print("second change")])
        >>> undo()
        second change
        first change
    """
    stack = ExitStack()
    for undo in undos:
        stack.callback(undo)
    return stack.close


def output_embeddings_of(model: nn.Module) -> list[nn.Module]:
    """The layers that make logits, as Hugging Face's models inside ``model`` tell by ``get_output_embeddings()``.

    Classes are asked, because adapters' wrappers pass on every attribute of the model that they hold.
    """
    models: list[Any] = [module for module in model.modules() if hasattr(type(module), "get_output_embeddings")]
    return [head for module in models if (head := module.get_output_embeddings()) is not None]


class Replacement:
    """Base of objects that replace a method of one module.

    They hold the module rather than a bound method, so that a copy of the model has its own.
    """

    def __init__(self, module: Any) -> None:
        self.module = module


class WrappedForward:
    """Replaces a module's ``forward``: in place, so that type, hooks and ``state_dict`` keys stay.

    Subclasses override ``__call__`` and reach what was there before through ``self.inner``. The object holds the
    module rather than a bound method, so that ``copy.deepcopy`` of the model gives a copy that calls itself.

    Attributes:
        ran: whether it ever did what it is for; subclasses that somebody asks set it.
        compiled: asks it to compile what it computes itself, if it can; see ``CompileBlocks(head=True)``.
        failure: why it could not.
        rounds: whether its numbers are those of the plain forward only within a bound.
        is_compiled: whether what lies beneath, and in the module's parts, is run as compiled code.
        is_replayed: whether that code is replayed as CUDA graphs.
        measures: whether it measures the module in some steps; see :attr:`is_measuring`.
        paused: asks one that rounds not to; see :func:`without_rounding`.
    """

    can_compile: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    is_compiled: ClassVar[bool] = False
    is_replayed: bool = False
    measures: ClassVar[bool] = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = replaced_forward(module)  # another wrapper, or None for the class's own method
        self.ran = False
        self.compiled = False
        self.failure: str | None = None
        self.paused = False

    @property
    def is_measuring(self) -> bool:
        """Whether it measures the module now, so that code around it must not be compiled."""
        return False

    @property
    def is_undecided(self) -> bool:
        """Whether it decides by the next forward and backward what it does from then on."""
        return False

    def inner(self, *args: object, **kwargs: object) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        # Looked up at each call, so that a method that is replaced on the class later counts.
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: subclasses name the arguments that they use
        return self.inner(*args, **kwargs)

    def install(self) -> Undo:
        """Put this object in place; the returned function takes it out again, wherever in the stack it then is."""
        put_on(self.module, self)
        return self.undo

    def install_below(self) -> Undo:
        """Put this object under the wrappers that are there already, directly around the module's own forward."""
        above = list(wrappers_on(self.module, WrappedForward))
        if not above:
            return self.install()
        self.previous = above[-1].previous
        above[-1].previous = self
        return self.undo

    def undo(self) -> None:
        """Take this object out, also from under others that were put on top since."""
        holder: object = replaced_forward(self.module)
        if holder is self:
            if self.previous is None:
                del self.module.forward
            else:
                put_on(self.module, self.previous)
            return
        while isinstance(holder, WrappedForward):
            if holder.previous is self:
                holder.previous = self.previous
                return
            holder = holder.previous


def put_on(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's ``forward`` by a wrapper, or by another function.

    A wrapper is installed as a bound method: the compiler distinguishes methods by their function, but other objects
    by identity, and would compile each block again that has such a layer.
    """
    if isinstance(forward, WrappedForward):
        forward = forward.__call__
    module.forward = forward


def replaced_forward(module: nn.Module) -> Any:
    """Return what stands in place of a module's own ``forward``: the outermost wrapper, another function, or None."""
    forward = module.__dict__.get("forward")
    holder = getattr(forward, "__self__", None)
    return holder if isinstance(holder, WrappedForward) else forward


W = TypeVar("W", bound=WrappedForward)


def wrapper_on(module: nn.Module, kind: type[WrappedForward]) -> bool:
    """Whether a wrapper of this ``kind`` already stands on ``module``, at any depth."""
    return next(wrappers_on(module, kind), None) is not None


def why_none_ran(model: nn.Module, kind: type[WrappedForward]) -> tuple[str, str] | None:
    """Why and what to do, if no wrapper of this ``kind`` ran in ``model``; None if one did, or there is none."""
    wrappers = list(wrappers_in(model, kind))
    if not wrappers or any(wrapper.ran for wrapper in wrappers):
        return None
    names = sorted({type(wrapper.module).__name__ for wrapper in wrappers})
    why = f"none of its {len(wrappers)} blocks ({', '.join(names)}) was called where gradients are taken"
    return why, "Name the modules that training_step calls, with blocks="


def count_wrapped(model: nn.Module, kind: type[WrappedForward], what: str = "block") -> str:
    """On how many modules wrappers of this ``kind`` stand: "12 blocks of LlamaDecoderLayer"; "" if on none."""
    kinds = Counter(type(module).__name__ for module in model.modules() if wrapper_on(module, kind))
    return " and ".join(f"{number_of(count, what)} of {name}" for name, count in kinds.items())


def wrappers_on(module: nn.Module, kind: type[W]) -> Iterator[W]:
    """The wrappers of this ``kind`` that stand on ``module``, the outermost first."""
    holder = replaced_forward(module)
    while isinstance(holder, WrappedForward):
        if isinstance(holder, kind):
            yield holder
        holder = holder.previous


def list_wrapped(model: nn.Module, kind: type[WrappedForward]) -> list[str]:
    """Return the names of the modules of ``model`` whose forward has a wrapper of this ``kind``."""
    return [name for name, module in model.named_modules() if wrapper_on(module, kind)]


def wrappers_in(model: nn.Module, kind: type[W]) -> Iterator[W]:
    """The wrappers of this ``kind`` that stand on any module of ``model``."""
    for module in model.modules():
        yield from wrappers_on(module, kind)


@contextmanager
def without_rounding(models: Iterable[nn.Module]) -> Iterator[None]:
    """Have wrappers that round give the plain forward's numbers, for a comparison that rounding would hide."""
    paused = [wrapper for model in models for wrapper in wrappers_in(model, WrappedForward) if wrapper.rounds]
    for wrapper in paused:
        wrapper.paused = True
    try:
        yield
    finally:
        for wrapper in paused:
            wrapper.paused = False


def patch(target: object, name: str, value: object) -> Undo:
    """Set an attribute on one *instance* and return how to restore it; the class is never touched.

    Example:
        >>> class Thing:
        ...     def answer(self): return 41
        >>> thing = Thing()
        >>> undo = patch(thing, "answer", lambda: 42)
        >>> thing.answer(), undo(), thing.answer()
        (42, None, 41)
    """
    missing = object()  # None may be what stood there
    # Only what stands on the object itself: a method of the class, restored as an attribute, would go into copies.
    previous = vars(target).get(name, missing)
    setattr(target, name, value)

    def undo() -> None:
        if previous is missing:
            if name in vars(target):  # the user may have deleted it meanwhile
                delattr(target, name)
        else:
            setattr(target, name, previous)

    return undo


def patch_all(target: object, values: Mapping[str, object]) -> Undo:
    """Set several attributes on one instance and return how to restore them; see :func:`patch`."""
    return undo_all([patch(target, name, value) for name, value in values.items()])


@contextmanager
def patched(holder: object, name: str, value: object) -> Iterator[None]:
    """Context in which ``holder.name`` is ``value``; see :func:`patch`."""
    restore = patch(holder, name, value)
    try:
        yield
    finally:
        restore()


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model is compiled: its operators cannot be seen, and looking would recompile it."""
    compiled = class_if_imported("torch._dynamo.eval_frame", "OptimizedModule")
    for module in model.modules():
        if isinstance(module, compiled) or module._compiled_call_impl is not None:
            return True
        if any(wrapper.is_compiled for wrapper in wrappers_on(module, WrappedForward)):
            return True
    return False


def is_replayed(model: nn.Module) -> bool:
    """Whether any part of a model is replayed as CUDA graphs, which keep memory of their own."""
    return any(wrapper.is_replayed for module in model.modules() for wrapper in wrappers_on(module, WrappedForward))


def without_dropout(model: nn.Module) -> Undo:
    """Set every rate of dropout in ``model`` to zero: of dropout layers, and numbers called ``…drop…`` in others.

    A rate that is written into a function call, or into a compiled graph, is not found. Norms keep their modes.

    Returns:
        How to undo it.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.LSTM(2, 2, num_layers=2, dropout=0.1))
        >>> undo = without_dropout(net)
        >>> net[0].p, net[1].dropout, undo(), net[0].p
        (0.0, 0.0, None, 0.5)
    """
    return undo_all([patch(module, name, 0.0) for module, name in _rates(model)])


def has_dropout(model: nn.Module) -> bool:
    """Whether :func:`without_dropout` would find a rate to switch off.

    Example:
        >>> has_dropout(nn.Dropout(0.5)), has_dropout(nn.Dropout(0.0))
        (True, False)
    """
    return next(_rates(model), None) is not None


def _rates(model: nn.Module) -> Iterator[tuple[object, str]]:
    for module in model.modules():
        # A replaced forward may drop the whole block.
        for holder in (module, *wrappers_on(module, WrappedForward)):
            for name, value in list(vars(holder).items()):
                rate = "drop" in name.lower() or (name == "p" and isinstance(holder, _DropoutNd))
                if rate and isinstance(value, float) and value > 0:
                    yield holder, name
