"""Run the list operators of an optimizer step on the local shards of sharded tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_REDUCES = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def run_on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
    """Run an elementwise list operator on the shards that this rank holds; other operators return NotImplemented.

    :class:`DTensor` does the same, but first propagates the sharding of each tensor past all others, which for the
    hundreds of parameters of an optimizer takes more time than the rest of a prediction.

    Args:
        func: the operator.
        args, kwargs: its arguments, with sharded tensors among them.
        run: the ``__torch_dispatch__`` of a mode, for tensors that are not sharded.
    """
    if not _is_elementwise(func):
        return NotImplemented
    lists = [value for value in (*args, *kwargs.values()) if _holds_tensors(value)]
    if not lists or not all(map(_share_sharding, *lists)):
        return NotImplemented
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if any(isinstance(value, DTensor) or value.ndim for value in others):
        return NotImplemented
    local_kwargs = {name: _take_shards(value) for name, value in kwargs.items()}
    result = run(func, (), tuple(map(_take_shards, args)), local_kwargs)
    if not isinstance(result, list | tuple):
        return result
    wrapped: list[Any] = []
    for tensor, like in zip(result, lists[0], strict=True):
        wrapped.append(DTensor(tensor, like._spec, requires_grad=False))  # type: ignore[call-arg]
    return wrapped


def _is_elementwise(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.startswith("_foreach_") and name.rstrip("_") not in _REDUCES


def _holds_tensors(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _share_sharding(*tensors: Tensor) -> bool:
    """Whether tensors at one place of the lists are sharded in the same way, so that their shards correspond."""
    first = tensors[0]
    if not isinstance(first, DTensor) or any(placement.is_partial() for placement in first.placements):
        return False
    return all(isinstance(other, DTensor) and other._spec == first._spec for other in tensors[1:])


def _take_shards(value: Any) -> Any:
    if not _holds_tensors(value):
        return value
    return [tensor._local_tensor for tensor in value]
