"""Run a function so that the tensors its operations save are recomputed in the backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.surroundings import Surroundings

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
