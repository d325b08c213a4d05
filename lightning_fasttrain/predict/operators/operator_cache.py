"""Cache of operator results on fake tensors, by the shapes, strides and dtypes of their arguments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

MOST_ENTRIES = 50_000
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CPU = torch.device("cpu")

_Builder = Callable[[Sequence[FakeTensor]], Any]  # tensors among the arguments → result
# Entries without a builder are operators that must run every time.
_cache: dict[tuple[Any, ...] | None, _Builder | None] = {}


def run_cached(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)``, built from the cache if it was called with such arguments before.

    The shapes, strides and dtypes of a result depend on those of the arguments. Not cached are operators that change
    the shape of an argument, results other than tensors, and calls with other arguments than fake CPU tensors and plain
    values.

    Args:
        func: the operator, called from a dispatch mode above the fake mode.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Source:
        ``FakeTensorMode`` has a cache of its own, which spends most of its time on symbolic shapes; here are none.
    """
    tensors: list[FakeTensor] = []
    # In a backward, function modes would be asked for each attribute of a tensor.
    with torch._C.DisableTorchFunction():
        key = _describe_call(func, args, kwargs, tensors)
        build = _cache.get(key)
        if build is not None:
            return build(tensors)
    if key is None or not tensors or key in _cache:
        return func(*args, **kwargs)
    return _run_and_cache(func, args, kwargs, key, tensors)


def _describe_call(
    func: object, args: Sequence[object], kwargs: Mapping[str, object], tensors: list[FakeTensor]
) -> tuple[Any, ...] | None:
    """Return what the result depends on and append the tensors to ``tensors``; None if it depends on more."""
    if not _is_cacheable(func) or torch.is_inference_mode_enabled():
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    by_type = _depends_on_types(func)
    if not _describe_all(args, by_type, key, tensors):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _describe_all((value,), by_type, key, tensors):
            return None
    return tuple(key)


def _describe_all(values: Iterable[Any], by_type: bool, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append descriptions of ``values`` to ``key``; return whether all have one."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            # A constant is a tensor whose values are known.
            if value.constant is not None or value.layout is not torch.strided or value.device.type != "cpu":
                return False
            key.append(_describe(value))
            tensors.append(value)
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            if not _describe_all(value, by_type, key, tensors):
                return False
        elif kind is float and by_type:
            key.append(float)
        elif kind in _PLAIN:
            key.append((kind, value))  # 1, 1.0 and True are equal
        else:
            return False
    return True


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return (*layout, tensor.requires_grad, tensor.is_neg(), tensor.is_conj())


_kinds: dict[Any, tuple[bool, bool]] = {}


def _is_cacheable(func: object) -> bool:
    """Whether ``func`` is an operator of PyTorch that does not change the shapes of its arguments."""
    return _find_kind(func)[0]


def _depends_on_types(func: object) -> bool:
    """Whether only the types of floats matter, not their values, as for products with a learning rate."""
    return _find_kind(func)[1]


def _find_kind(func: object) -> tuple[bool, bool]:
    if func not in _kinds:
        is_operator = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        cacheable = is_operator and torch.Tag.inplace_view not in func.tags
        pointwise = cacheable and (torch.Tag.pointwise in func.tags or func.name().startswith("aten::_foreach_"))
        _kinds[func] = cacheable, pointwise
    return _kinds[func]


def _run_and_cache(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: tuple[object, ...], tensors: list[FakeTensor]
) -> Any:
    before = list(map(_describe, tensors))
    result = func(*args, **kwargs)
    if len(_cache) >= MOST_ENTRIES:
        _cache.clear()
    with torch._C.DisableTorchFunction():
        unchanged = before == list(map(_describe, tensors))
        _cache[key] = _find_builder(result, tensors) if unchanged else None
    return result


def _find_builder(result: Any, tensors: Sequence[FakeTensor]) -> _Builder | None:
    """Return a function that builds ``result`` from the arguments; None if that is not possible."""
    kind = type(result)
    if kind not in (list, tuple):
        return _find_part_builder(result, tensors)
    parts = [_find_part_builder(part, tensors) for part in result]
    shared = set(map(_storage_of, tensors))
    storages = map(_storage_of, filter(torch.is_tensor, result))
    own = [storage for storage in storages if storage not in shared]
    if None in parts or len(own) > len(set(own)):
        return None
    return lambda arguments: kind([part(arguments) for part in parts])  # type: ignore[misc]


def _find_part_builder(part: object, tensors: Sequence[FakeTensor]) -> _Builder | None:
    if part is None:
        return _build_none
    for place, tensor in enumerate(tensors):
        if part is tensor:
            return itemgetter(place)
    if type(part) is not FakeTensor or not _describe_all((part,), False, [], []) or part.requires_grad:
        return None
    storage = _storage_of(part)
    places = [place for place, tensor in enumerate(tensors) if _storage_of(tensor) == storage]
    if len(places) > 1:
        return None
    build = partial(_build_tensor, tuple(part.shape), part.stride(), part.storage_offset(), part.dtype, *places)
    copy = build(tensors)
    return build if _is_same(part, copy) else None


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    sizes = tensor.untyped_storage().nbytes() == copy.untyped_storage().nbytes()
    keys = torch._C._dispatch_key_set(tensor) == torch._C._dispatch_key_set(copy)
    return sizes and keys and _describe(tensor) == _describe(copy)


def _build_none(_: Sequence[FakeTensor]) -> None:
    return None


def _build_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, *rest: Any
) -> FakeTensor:
    """Build a new tensor or, if the position of an argument is given before ``arguments``, a view of that argument."""
    *places, arguments = rest
    mode: FakeTensorMode = arguments[0].fake_mode
    with in_kernel_invocation_manager(mode):
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for place in places:
            like.set_(arguments[place].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, like, _CPU)
