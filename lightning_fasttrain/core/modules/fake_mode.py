"""Make tensors with shapes but without memory, which may be copied, and remember what operators make of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_CPU = torch.device("cpu")
_LIFT = torch.ops.aten.lift_fresh.default  # called by torch.tensor()


class FakeMode(FakeTensorMode):
    """Makes fake tensors, beside real ones; copies of them are in the same mode, and results come from a cache.

    ``copy.deepcopy`` of a fake tensor, as by PEFT and ``nn.TransformerEncoder``, copies PyTorch's mode too, and with it
    the ``StorageWeakRef`` of each constant. Every copy of such a reference releases it when it dies, so that memory in
    use is freed, and the process crashes later, in another place.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[str, object] = {}  # of a fake tensor on the CPU

    def wrap(self, like: Tensor) -> FakeTensor:
        """Return what ``FakeTensor(self, like, "cpu")`` does, in a fifth of its time: copy the attributes of another.

        Args:
            like: a meta tensor, whose sizes, strides and dtype it has; without a gradient.
        """
        if not self._attributes:
            made = FakeTensor(self, like, _CPU)
            self._attributes.update(vars(made))
            return made
        made = Tensor._make_subclass(FakeTensor, like, False, dispatch_device=True, device_for_backend_keys=_CPU)
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made

    @cached_property
    def avoid_device_init(self) -> bool:
        """Whether there is no device to start; PyTorch looks for one, and for its driver, at each operator."""
        return super().avoid_device_init

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if takes_no_tensor(func):
            with no_dispatch():
                return func(*args, **(kwargs or {}))
        return run_cached(func, args, kwargs or {}, self, partial(self.dispatch, func, types))[0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it runs where nothing is compiled, and the guard against it takes 50 µs

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors; a number is made one here, in a tenth of PyTorch's time."""
        number = args[0] if func is _LIFT else None
        if type(number) is Tensor and number.numel() == 1 and number.layout is torch.strided and number.is_cpu:
            return self._lift(number)
        return super().dispatch(func, types, args, kwargs or {})

    def _lift(self, number: Tensor) -> FakeTensor:
        # An optimizer has a count of steps for each parameter.
        with no_dispatch():
            like, constant = torch.empty_like(number, device="meta"), number.clone()
        fake = self.wrap(like)
        fake.constant = constant
        self.fake_tensor_converter.add_constant_storage_mapping(fake)  # by which it is forgotten once it is written to
        return fake

    def __deepcopy__(self, _: object) -> "FakeMode":
        return self


_MOST_ENTRIES = 50_000
# Their results depend on nothing but their arguments, even on which group communicates.
_CACHED_NAMESPACES = ("aten", "fsdp", "_c10d_functional")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class CallKey(NamedTuple):
    """The key of an operator's result in a cache, with the tensors among its arguments.

    Args:
        key: operator, and layouts and values of its arguments; None if the result depends on more.
        tensors: the tensors among its arguments, of a call with a key.
    """

    key: tuple[Any, ...] | None
    tensors: list[FakeTensor]


_Builder = Callable[[Any, Sequence[FakeTensor]], Any]  # fake mode, tensors among the arguments → result
# Entries without a builder are operators that must run every time.
_cache: dict[tuple[Any, ...] | None, _Builder | None] = {}


def run_cached(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode | None = None,
    run: Callable[..., Any] | None = None,
) -> tuple[Any, CallKey]:
    """Return ``func(*args, **kwargs)``, built from the cache if it was called with such arguments before, and the key.

    The shapes, strides and dtypes of a result depend on those of the arguments. Not cached are operators that change
    the shape of an argument, results other than tensors, and calls with other arguments than fake CPU tensors and plain
    values.

    Args:
        func: the operator, called from a dispatch mode above the fake mode, or from it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        mode: the fake mode; by default that of the arguments.
        run: (args, kwargs) → result, where there is none in the cache; by default the operator itself.

    Source:
        ``FakeTensorMode`` has a cache of its own, which spends most of its time on symbolic shapes; here are none.
    """
    kind = _find_kind(func)
    # It allocates nothing, and would take as long as an operator on each parameter. Counts of steps have values.
    if kind.writes_a_list and not any(map(_has_value, args[0])):
        return None, CallKey(None, [])
    # In a backward, function modes would be asked for each attribute of a tensor.
    with torch._C.DisableTorchFunction():
        key, tensors = call = _describe_call(func, kind, args, kwargs)
        if tensors:
            mode = tensors[0].fake_mode
        build = _cache.get(key)
        if build is not None and mode is not None:
            return build(mode, tensors), call
        before = list(map(_describe, tensors))
        result = func(*args, **kwargs) if run is None else run(args, kwargs)
        if key is not None and mode is not None and key not in _cache:
            if len(_cache) >= _MOST_ENTRIES:
                _cache.clear()
            unchanged = before == list(map(_describe, tensors))
            _cache[key] = _find_builder(result, mode, tensors) if unchanged else None
        return result, call


@cache
def takes_no_tensor(func: object) -> bool:
    """Return whether an operator neither takes nor returns a tensor, like the marks of the profiler."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    given = (*func._schema.arguments, *func._schema.returns)
    return not any("Tensor" in str(value.type) for value in given)


_layout_of = Tensor.layout.__get__  # type: ignore[attr-defined]


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor has strides; a fake one is asked in a third of the time of its own property."""
    if type(tensor) is FakeTensor and tensor.dispatch_keys is None:
        return _layout_of(tensor) is torch.strided
    return tensor.layout is torch.strided


def _has_value(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _describe_call(func: object, kind: "_Kind", args: Sequence[object], kwargs: Mapping[str, object]) -> CallKey:
    tensors: list[FakeTensor] = []
    key: list[Any] = [func, torch.get_default_dtype()]
    is_known = kind.is_cacheable and not torch.is_inference_mode_enabled()
    is_known = is_known and _describe_all(args, kind.by_type, key, tensors)
    for name, value in kwargs.items():
        key.append(name)
        is_known = is_known and _describe_all((value,), kind.by_type, key, tensors)
    return CallKey(tuple(key), tensors) if is_known else CallKey(None, [])


def _describe_all(values: Iterable[Any], by_type: bool, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append descriptions of ``values`` to ``key``; return whether all have one."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            # A constant is a tensor whose values are known.
            if value.constant is not None and value.numel():
                return False
            if not is_strided(value) or value.fake_device.type != "cpu":
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


class _Kind(NamedTuple):
    """Properties of an operator that decide whether its result can be cached.

    Attributes:
        is_cacheable: whether it is one of PyTorch that does not change the shapes of its arguments.
        by_type: whether only the types of floats matter, not their values, as for products with a learning rate.
        writes_a_list: whether it writes to the tensors of a list, and returns nothing.
    """

    is_cacheable: bool
    by_type: bool
    writes_a_list: bool


@cache
def _find_kind(func: Any) -> _Kind:
    name = func.overloadpacket.__name__
    in_lists = name.startswith("_foreach_")
    is_operator = isinstance(func, torch._ops.OpOverload) and func.namespace in _CACHED_NAMESPACES
    is_cacheable = is_operator and torch.Tag.inplace_view not in func.tags
    by_type = is_cacheable and (torch.Tag.pointwise in func.tags or in_lists)
    return _Kind(is_cacheable, by_type, in_lists and name.endswith("_"))


def _find_builder(result: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> _Builder | None:
    """Return a function that builds ``result`` from the arguments; None if that is not possible."""
    kind = type(result)
    # An operator on lists has as many results as arguments, so each result is looked up instead of compared with all.
    places: dict[int, int] = {}
    sharing: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(id(tensor), place)
        sharing.setdefault(_storage_of(tensor), []).append(place)

    def find_part(part: object) -> _Builder | None:
        if part is None:
            return _build_none
        if id(part) in places:
            return partial(_take, places[id(part)])
        if type(part) is not FakeTensor or not _describe_all((part,), False, [], []) or part.requires_grad:
            return None
        bases = sharing.get(_storage_of(part), [])
        if len(bases) > 1:
            return None
        layout = (tuple(part.shape), part.stride(), part.storage_offset(), part.dtype)
        build = partial(_build_tensor, *layout, bases[0] if bases else None)
        return build if _is_same(part, build(mode, tensors)) else None

    if kind not in (list, tuple):
        return find_part(result)
    parts = list(map(find_part, result))
    storages = map(_storage_of, filter(torch.is_tensor, result))
    own = [storage for storage in storages if storage not in sharing]
    if None in parts or len(own) > len(set(own)):
        return None
    return lambda mode, tensors: kind([part(mode, tensors) for part in parts])  # type: ignore[misc]


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    sizes = tensor.untyped_storage().nbytes() == copy.untyped_storage().nbytes()
    keys = torch._C._dispatch_key_set(tensor) == torch._C._dispatch_key_set(copy)
    return sizes and keys and _describe(tensor) == _describe(copy)


def _build_none(*_: object) -> None:
    return None


def _take(place: int, _: object, tensors: Sequence[FakeTensor]) -> FakeTensor:
    return tensors[place]


def _build_tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    base: int | None,
    mode: FakeTensorMode,
    tensors: Sequence[FakeTensor],
) -> FakeTensor:
    """Build a new tensor, or a view of the argument ``base``."""
    with no_dispatch():
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            like.set_(tensors[base].untyped_storage(), offset, shape, stride)
    return mode.wrap(like) if isinstance(mode, FakeMode) else FakeTensor(mode, like, _CPU)
