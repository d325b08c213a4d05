"""Run a function, or a module's forward, so that its saved tensors are recomputed in the backward."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from dis import get_instructions
from functools import cache
from itertools import islice
from operator import is_
from types import CodeType, FunctionType
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.core.state.restore import Surroundings, remember_attributes

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@torch._disable_dynamo
def recompute_in_backward(function: Callable[..., Any], inputs: Sequence[object], contexts: Contexts) -> Any:
    """Call ``function`` on ``inputs`` and keep nothing else for the backward, which calls it again.

    The result, gradients of any order, and backwards through a retained graph are those of a plain call. In the second
    call random generators, autocast, and the default dtype and device are as they were in the first one. It ends as
    soon as all that was saved is there again.

    Args:
        function: called with gradients enabled.
        inputs: by position. Only tensors that are inputs themselves, not parts of one, are given to hooks on saved
            tensors, and tell the devices whose generators are restored.
        contexts: entered for the first call, and for every later one.

    Raises:
        RuntimeError: in the backward: an input was written to, or the later call saves other tensors.

    Example:
        >>> from contextlib import nullcontext
        >>> x = torch.randn(3, requires_grad=True)
        >>> y = recompute_in_backward(lambda x: x.sin().cos(), [x], (nullcontext(), nullcontext()))
        >>> torch.allclose(torch.autograd.grad(y.sum(), x)[0], -x.sin().sin() * x.cos())
        True

    Source:
        The non-reentrant form of ``torch.utils.checkpoint``, which adds 1.5 times as much time on the host: here places
        hold what was recomputed for them, instead of a dictionary for each backward.
    """
    call = _Call(function, inputs, contexts[1])
    with saved_tensors_hooks(call.pack, call.unpack), contexts[0]:
        output = function(*inputs)
    call.around.look()
    return output


class _Place:
    """Stands in the graph for a saved tensor, and holds it from the recomputation until it is used."""

    __slots__ = ("__weakref__", "device", "dtype", "shape", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.value: Tensor | None = None

    def fits(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and tensor.dtype == self.dtype and tensor.device == self.device


class _Complete(BaseException):
    """Ends a recomputation. Code that catches every Exception must not stop it."""


class _Call:
    """One call of a function: what the recomputation needs, and the places of what it saved, in their order.

    Places are held weakly: what the graph no longer needs is not kept when it is recomputed.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[object], again: AbstractContextManager[Any]
    ) -> None:
        self.function, self.again = function, again
        self.inputs = list(map(_Input, inputs))
        self.around = Surroundings(inputs)
        self.places: list[ref[_Place]] = []

    def pack(self, tensor: Tensor) -> _Place:
        place = _Place(tensor)
        self.places.append(ref(place))
        return place

    def unpack(self, place: _Place) -> Tensor:
        """Return what was recomputed for the place, which is empty then: the tensor is freed once it is used."""
        value = self.look_up(place)
        place.value = None
        return value

    def look_up(self, place: _Place | Tensor) -> Tensor:
        if isinstance(place, Tensor):
            return place
        if place.value is None:
            self.recompute()
        assert place.value is not None, "a recomputation fills every place"
        return place.value

    @torch._disable_dynamo  # compiled autograd would trace it
    def recompute(self) -> None:
        """Call the function again, and put what it saves into the places."""
        places, filled = self.places, 0
        number = len(places)

        def pack(tensor: Tensor) -> _Place | Tensor:
            nonlocal filled
            if filled == number:  # code that catches even a BaseException has continued
                return without_graph(tensor)
            place = places[filled]()
            filled += 1
            value = without_graph(tensor)
            if place is not None:
                if not place.fits(tensor):
                    self._refuse_other(place, tensor)
                place.value = value
            if filled == number:
                raise _Complete
            # In the graph of the recomputation too, for a backward inside the function.
            return value if place is None else place

        inputs = [kept.value() for kept in self.inputs]
        with suppress(_Complete), self.around.restored(), self.again, torch.enable_grad():
            with saved_tensors_hooks(pack, self.look_up):
                self.function(*inputs)
        if filled < number:
            raise RuntimeError(_explain_difference(f"{filled} tensors instead of {number}"))

    def _refuse_other(self, place: _Place, tensor: Tensor) -> None:
        now = f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        then = f"{tuple(place.shape)} in {place.dtype} on {place.device}"
        raise RuntimeError(_explain_difference(f"a tensor of shape {now} instead of {then}"))


def without_graph(tensor: Tensor) -> Tensor:
    """Return a saved tensor as a hook may keep it.

    If an operation saves its own output, as tanh does, the output references its graph, and the graph, through the
    hook, the output. Only a backward would free this cycle.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def _explain_difference(saved: str) -> str:
    why = "it did not run the same operations again: it reads something that has changed since the forward"
    way_out = "Make the forward depend on its inputs and random numbers alone, or leave this block out"
    return explain(f"the recomputation of a forward saved {saved}", why, way_out)


class _Input:
    """An input of the forward; a tensor is given to the hooks around it as if an operation had saved it."""

    def __init__(self, value: object) -> None:
        self._kept: Any = value
        self._unpack: Callable[[Any], Tensor] | None = None
        self._version = value._version if has_version(value) else 0
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and isinstance(value, Tensor):
            pack, self._unpack = hooks
            self._requires_grad = value.requires_grad
            with torch.no_grad():
                self._kept = pack(value.detach())

    def value(self) -> object:
        if self._unpack is not None:
            with torch.no_grad():
                value = self._unpack(self._kept).detach()
            with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse what it does not know
                return value.requires_grad_(self._requires_grad)
        if has_version(self._kept) and self._kept._version != self._version:
            what = f"an input of shape {tuple(self._kept.shape)} was written to after the forward"
            way_out = "Write x = x + y instead of x += y, or leave this block out"
            raise RuntimeError(explain(what, "the backward recomputes the forward from it", way_out))
        return self._kept


def has_version(value: object) -> TypeGuard[Tensor]:
    """Whether the value is a tensor that counts how often it was written to."""
    return isinstance(value, Tensor) and not value.is_inference()


def refuse_second_derivative(function: str, way_out: str) -> None:
    """Refuse to be walked backward with ``create_graph=True``; to be called first in a custom function's backward.

    :func:`torch.autograd.function.once_differentiable` refuses only where the incoming gradient needs one itself, and
    that of a loss is a constant: what depends on the gradients is then a constant, too, without an error.

    Args:
        function: what the user called.
        way_out: what to do instead.

    Raises:
        RuntimeError: a graph of the gradients is wanted.
    """
    # The compiler's own functions refuse second derivatives, and it traces the backward with gradients on.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        why = "its gradients are computed without a graph of their own, so a second derivative would be wrong"
        raise RuntimeError(explain(f"{function} in a backward with create_graph=True", why, way_out))


def refuse_transforms(function: str, way_out: str, *tensors: Tensor | None) -> None:
    """Refuse ``torch.func``'s transforms and forward-mode derivatives, which a custom function has no rules for.

    Args:
        function: what the user called.
        way_out: what to do instead.
        tensors: what it was given; any of them may be a dual number.

    Raises:
        RuntimeError: it runs inside of ``torch.func.grad``, ``vmap`` or their like, or a tensor has a tangent.
    """
    if torch.compiler.is_compiling():
        return
    why = "it has no rule for them, only for backward()"
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(explain(f"{function} under torch.func's transforms", why, way_out))
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None):
        raise RuntimeError(explain(f"{function} of dual numbers, in forward-mode derivatives", why, way_out))


# Whether a forward around this one is recomputed as a whole: then the ones inside need not be, once more.
recomputed_outside: ContextVar[bool] = ContextVar("recomputed_outside", default=False)


class RecomputedForward(WrappedForward):
    """Base of wrappers whose forward is recomputed in the backward pass, with the buffers that it had.

    Args:
        module: whose buffers are in the recomputation as they were.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Places of the buffers that the forward changes. The kernels of these norms do it behind autograd's back; any
        # other change raises the buffer's version, and is noticed at the first forward.
        norms = nn.modules.batchnorm._NormBase
        self.changing = {place for place in _buffers_of(module) if isinstance(place[0], norms)}
        self.seen = False
        self.looked = False
        self.watched = 1  # number of coming forwards that may write to parameters, as the first
        # Watched only where some code could set them, since that takes time at each forward.
        self.attributes = list(map(_Attributes, module.modules()))
        if not any(_sets_attributes(kind) for one in module.modules() for kind in type(one).__mro__):
            self.attributes = [one for one in self.attributes if one.containers]

    def versions_of(self, inputs: Iterable[object]) -> list[int]:
        """Return how often each tensor among the inputs was written to, before the first forward in training."""
        return [] if self.looked else _versions(inputs)

    def look_at(self, output: object, inputs: Sequence[object], versions: list[int]) -> None:
        """Refuse, after the first forward in training, what cannot be recomputed and no module shows.

        Raises:
            RuntimeError: the forward from ``inputs``, which had these ``versions``, to ``output`` writes into one of
                them, or has an rrelu.
        """
        if self.looked or not self.module.training:
            return
        recomputed = f"{type(self.module).__name__}, which is recomputed in the backward"
        if _versions(inputs) != versions:
            why = "the recomputation would read what it wrote"
            way_out = "Write x = x + y instead of x += y, set inplace=False, or leave this block out"
            raise RuntimeError(explain(f"{recomputed}, writes into its input in place", why, way_out))
        for node in nodes_between(output, inputs):
            # Without training its noise is not used.
            if node.name().startswith("Rrelu") and node._saved_training:
                why = "torch saves its noise before it is drawn, and the recomputation may stop in between"
                way_out = "Use another activation, such as LeakyReLU, or leave this block out"
                raise RuntimeError(explain(f"rrelu in {recomputed}", why, way_out))
        self.looked = True

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """For a forward that does not count: random states, buffers and attributes are afterwards as they were.

        So are parameters of modules that set attributes, as in a lazy initialization.
        """
        parameters = list(self.module.parameters()) if self.attributes and self.watched else []
        copies = [(p, p.detach().clone()) for p in parameters if _norm_of(p) is not None]
        self.seen = False  # which buffers change is not known yet: copy all
        _, again = self.contexts(nullcontext(), nullcontext())
        around = Surroundings(islice(self.module.parameters(), 1))
        restore_attributes = remember_attributes(self.module.modules())
        try:
            with around.restored(), again, capturing_nothing():
                yield
        finally:
            restore_attributes()
            for parameter, before in copies:
                if not torch.equal(parameter, before):
                    parameter.data.copy_(before)
            self.seen = False

    def contexts(self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]) -> Contexts:
        """Return the contexts of forward and recomputation, each with a further context entered inside."""
        if self.attributes:
            keeping, reusing = self._with_attributes(keeping, reusing)
        buffers = _buffers_of(self.module)
        if not buffers:
            return keeping, reusing
        # At the first forward all buffers are copied, to be sure.
        unseen, self.seen = not self.seen, True
        before = {
            place: buffer.detach().clone() for place, buffer in buffers.items() if unseen or place in self.changing
        }

        @contextmanager
        def forward() -> Iterator[None]:
            versions = {place: buffer._version for place, buffer in buffers.items()}
            with keeping:
                yield
            for (owner, key), buffer in buffers.items():
                if buffer._version != versions[owner, key] or owner._buffers.get(key) is not buffer:
                    self.changing.add((owner, key))
            # ``before`` lives until the backward; from the second forward on it holds just these in the first place.
            for place in before.keys() - self.changing:
                del before[place]

        @contextmanager
        def recompute() -> Iterator[None]:
            # The buffers of now, not of then: other batches may have come between forward and backward.
            held = {(owner, key): owner._buffers[key] for owner, key in buffers}
            for (owner, key), earlier in before.items():
                # The recomputation changes a copy of what the forward saw.
                owner._buffers[key] = earlier.clone()
            try:
                with reusing:
                    yield
            finally:
                for (owner, key), buffer in held.items():
                    owner._buffers[key] = buffer

        return forward(), Again(recompute)

    def _with_attributes(
        self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]
    ) -> Contexts:
        """Return the contexts of forward and recomputation, in which attributes that the forward sets are as before it.

        A temperature that is lowered at each forward, for example, or the flag of a cache. Where a forward, such as the
        first, also writes to parameters, which are not restored, attributes stay as it has set them.
        """
        changed: list[tuple[dict[str, Any], str, Any]] = []

        @contextmanager
        def forward() -> Iterator[None]:
            before, hooks = [one.read() for one in self.attributes], _count_hooks(self.attributes)
            parameters = list(self.module.parameters()) if self.watched else []
            norms = list(map(_norm_of, parameters))
            with keeping:
                yield
            # Done once, as hooks are installed by models of transformers, and so is the flag that says so.
            written = list(map(_norm_of, parameters)) != norms
            self.watched = _WATCHED if written else max(0, self.watched - 1)
            if written or _count_hooks(self.attributes) != hooks:
                return
            for one, (values, copies) in zip(self.attributes, before, strict=True):
                for name, value in one.list_changed(values, copies):
                    changed.append((vars(one.module), name, value))

        @contextmanager
        def recompute() -> Iterator[None]:
            now = [(held, name, held.get(name, _MISSING)) for held, name, _ in changed]
            for held, name, value in changed:
                _set_attribute(held, name, copy(value) if type(value) in _CONTAINERS else value)
            try:
                with reusing:
                    yield
            finally:
                for held, name, value in now:
                    _set_attribute(held, name, value)

        return forward(), Again(recompute)


_CONTAINERS = (list, dict, set, deque)
_WATCHED = 64  # forwards after one that wrote to parameters, which a trial may have undone


class _Attributes:
    """The attributes of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.containers = self._find_containers()

    def _find_containers(self) -> list[str]:
        """Return the names of those that can be changed in place."""
        held = vars(self.module)
        return [name for name in held.keys() - _OF_MODULES if type(held[name]) in _CONTAINERS]

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes, and copies of the containers among them."""
        values = dict(vars(self.module))
        return values, {name: copy(values[name]) for name in self.containers if name in values}

    def list_changed(self, values: dict[str, Any], copies: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return name and earlier value of what differs from what :meth:`read` returned."""
        held = vars(self.module)
        written = [name for name in copies if not _hold_the_same(values[name], copies[name])]
        # Compared all at once, since this is done at each forward.
        if not written and list(map(id, held.values())) == list(map(id, values.values())):
            return []
        self.containers = self._find_containers()
        names = (values.keys() | held.keys()) - _OF_MODULES
        written += [name for name in names if held.get(name, _MISSING) is not values.get(name, _MISSING)]
        return [(name, copies.get(name, values.get(name, _MISSING))) for name in dict.fromkeys(written)]


_MAKING = ("__init__", "__init_subclass__", "__setstate__")


@cache
def _sets_attributes(kind: type) -> bool:
    """Whether a method of a class, other than those that make one, sets attributes of anything."""
    if kind.__module__.startswith("torch.nn.modules."):
        return False
    functions = [getattr(value, "__wrapped__", value) for name, value in vars(kind).items() if name not in _MAKING]
    return any(_stores(function.__code__) for function in functions if isinstance(function, FunctionType))


def _stores(code: CodeType) -> bool:
    if "setattr" in code.co_names:
        return True
    if any(one.opname in ("STORE_ATTR", "DELETE_ATTR") for one in get_instructions(code)):
        return True
    return any(map(_stores, (inner for inner in code.co_consts if isinstance(inner, CodeType))))


def _norm_of(parameter: Tensor) -> float | None:
    """Return a norm that tells whether a parameter has changed; None where it has no values here."""
    hidden = parameter.is_meta or not parameter.is_floating_point() or is_traceable_wrapper_subclass(parameter)
    if hidden or detect_fake_mode([parameter]) is not None:
        return None
    return float(torch.linalg.vector_norm(parameter.detach()))


def _count_hooks(attributes: Sequence[_Attributes]) -> int:
    return sum(len(one.module._forward_hooks) + len(one.module._forward_pre_hooks) for one in attributes)


_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))  # hooks and the like, and what is in other dicts


def _hold_the_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))
    return len(one) == len(other) and (one == other if isinstance(one, set) else all(map(is_, one, other)))


def _set_attribute(held: dict[str, Any], name: str, value: object) -> None:
    if value is _MISSING:
        held.pop(name, None)
    else:
        held[name] = value


@contextmanager
def capturing_nothing() -> Iterator[None]:
    """Models of transformers collect outputs of their layers by hooks, such as router logits: not those of a trial."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def _versions(values: Iterable[object]) -> list[int]:
    return [value._version for value in values if has_version(value)]


def _buffers_of(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return each buffer in ``module`` by the module that holds it, and its key there."""
    found: dict[tuple[nn.Module, str], Tensor] = {}
    ahead: list[nn.Module | None] = [module]
    done: set[nn.Module | None] = {None}
    # Done at every call, and several times as fast as ``named_modules``.
    while ahead:
        owner = ahead.pop()
        if owner is None or owner in done:
            continue
        done.add(owner)
        ahead += owner._modules.values()
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                found[owner, key] = buffer
    return found


def nodes_between(output: object, inputs: object) -> Iterator[Any]:
    """Every node of the graph of ``output`` that comes after those of ``inputs``."""
    done, ahead = set(_grad_fns(inputs)), _grad_fns(output)
    while ahead:
        node = ahead.pop()
        if node is None or node in done:
            continue
        done.add(node)
        yield node
        ahead.extend(before for before, _ in node.next_functions)


def _grad_fns(values: object) -> list[Any]:
    return [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Again(AbstractContextManager[None]):
    """A context that can be entered again, as by a second backward through the same graph: ``make`` makes a new one."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.context = self.make()
        self.context.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self.context.__exit__(*exception)
