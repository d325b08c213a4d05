"""Run a function, or a module's forward, so that its saved tensors are recomputed in the backward."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.forward_attributes import Again, Contexts, ForwardAttributes
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.core.state.surroundings import Surroundings


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
        self.attributes = ForwardAttributes(module)

    def versions_of(self, inputs: Iterable[object]) -> list[int]:
        """Return how often each tensor among the inputs was written to, before the first forward in training."""
        return [] if self.looked else _versions(inputs)

    def examine(self, output: object, inputs: Sequence[object], versions: list[int]) -> None:
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
        """For a forward that does not count: afterwards all is as it was.

        That is random states, buffers, attributes and what is in them, and, while a forward may be a first one that
        initializes them, parameters.
        """
        self.seen = False  # which buffers change is not known yet: copy all
        _, again = self._with_buffers(nullcontext(), nullcontext())
        around = Surroundings(islice(self.module.parameters(), 1))
        state = StepState([self.module], parameters=not is_sharded(self.module))
        if self.attributes.may_write_parameters:
            state.copy_all()
        try:
            with around.restored(), again, capturing_nothing():
                yield
        finally:
            state.restore_values()
            self.seen = False

    def contexts(self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]) -> Contexts:
        """Return the contexts of forward and recomputation, each with a further context entered inside."""
        return self._with_buffers(*self.attributes.contexts(keeping, reusing))

    def _with_buffers(
        self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]
    ) -> Contexts:
        """Return the contexts of forward and recomputation, in which buffers are as before the forward."""
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
