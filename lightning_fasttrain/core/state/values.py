"""Copy, compare and select values of any kind: tensors, numbers, containers, objects, and entries of a state_dict."""

import enum
import math
import random
import types
from collections import deque
from collections.abc import Container, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WITHOUT_FLOAT64 = ("mps", "xpu")  # Apple's GPUs, and those of Intel that are not for data centers
# Values that never change: a step can only put another one in their place.
PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, range, slice, torch.dtype, torch.device, torch.Size)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType)
# Packages whose objects, other than containers, are not visited: loaders, optimizers, loggers, threads.
_FOREIGN = frozenset(
    """builtins torch lightning pytorch_lightning lightning_fasttrain deepspeed logging threading
    concurrent queue asyncio multiprocessing socket subprocess wandb mlflow tensorboard tensorboardX
    comet_ml neptune clearml _thread""".split()  # noqa: SIM905
)
_SMALL = 1e-5  # relative difference of values that were computed in other batches
DEEPEST = 12  # containers and objects inside one another


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def read_generator(generator: Any) -> Any:
    """Return the state of a generator of random numbers of torch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def copy_value(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value for :func:`same_values`: tensors in containers and objects are copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth > DEEPEST or isinstance(value, (*PLAIN, *CODE, nn.Module)):
        return value
    if isinstance(value, dict):
        return {key: copy_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, deque | tuple):
        return tuple(copy_value(item, depth + 1) for item in value)
    if isinstance(value, list):
        return [copy_value(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return set(value)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not is_foreign(type(value)):
        return {key: copy_value(item, depth + 1) for key, item in own.items()}
    return value


def same_values(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two copies of a value are equal; numbers may differ by ``tolerance``, relative to their size.

    Example:
        >>> same_values([torch.ones(2), 1.0], [torch.ones(2), 1.0 + 1e-9], tolerance=1e-6)
        True
        >>> same_values({"n": 1}, {"n": 2}, tolerance=1e-6)
        False
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _near_tensors(one, other, tolerance)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same_values(*pair, tolerance) for pair in zip(one, other, strict=True))
    return is_same(one, other) or (isinstance(one, set) and one == other)


def same_changes(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two changes (before, now) of one value are the same, up to rounding.

    Numbers are compared relative to how far they moved: a teacher that is updated twice is off by its whole update, be
    it a millionth of its size.
    """
    (before, now), (_, other_now) = one, other
    if isinstance(now, float) and isinstance(other_now, float) and isinstance(before, float):
        now, other_now, before = torch.tensor([now, other_now, before], dtype=torch.float64).unbind()
    are_floats = all(isinstance(value, Tensor) and value.is_floating_point() for value in (before, now, other_now))
    if not (are_floats and before.shape == now.shape == other_now.shape):
        return same_values(now, other_now, _SMALL)
    tensors: list[Any] = [now, other_now, before]
    first, second, start = map(to_float64, tensors)
    if not torch.equal(first.isnan(), second.isnan()):
        return False
    moved, missed = ((first - one).nan_to_num().norm() for one in (start, second))
    rounding = 2 * torch.finfo(now.dtype).eps * first.nan_to_num().norm()
    return bool(missed <= 1e-3 * moved + rounding)


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it.

    Example:
        >>> widest_float(torch.device("cpu")), widest_float(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def to_float64(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in float64: on its device, or on the CPU if the device has no float64.

    Example:
        >>> to_float64(torch.ones(1))
        tensor([1.], dtype=torch.float64)
    """
    tensor = tensor.detach()
    if tensor.device.type in _WITHOUT_FLOAT64:
        tensor = tensor.cpu()
    return tensor.double()


def is_same(one: object, other: object) -> bool:
    """Whether they are one object, or plain values that are equal."""
    if one is other:
        return True
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one == other
    if type(one) is not type(other) or not isinstance(one, PLAIN):
        return False
    return one == other or (one != one and other != other)


def _near_tensors(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not tolerance or not one.is_floating_point():
        return equal_tensors(one, other)
    size = float(to_float64(other).nan_to_num().norm())
    missed = float((to_float64(one) - to_float64(other)).nan_to_num().norm())
    return missed <= tolerance * max(size, 1e-30) and torch.equal(one.isnan(), other.isnan())


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values, of which NaN equals NaN."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.device.type == "meta" or isinstance(one, FakeTensor):  # without values
        return True
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def memory_of(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and its first byte there and the byte after its last."""
    # Sharded and lazy parameters, for example, have no memory of their own to compare.
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        return id(tensor), 0, 1
    if not tensor.numel():
        return id(tensor), 0, 1
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    # ``_cdata`` distinguishes storages on the meta device, which have no memory and a ``data_ptr()`` of 0.
    return tensor.untyped_storage()._cdata, start, start + (int(steps) + 1) * tensor.itemsize


def is_foreign(kind: type) -> bool:
    """Whether objects of a class are not visited: those of torch, the host, loggers and the like."""
    return kind.__module__.partition(".")[0] in _FOREIGN


K = TypeVar("K")
V = TypeVar("V")


def only(values: Mapping[K, V], keys: Container[object]) -> dict[K, V]:
    """Return the entries whose key is among ``keys``.

    Example:
        >>> only({"lr": 0.1, "params": []}, ["lr"])
        {'lr': 0.1}
    """
    return {key: value for key, value in values.items() if key in keys}


def without(values: Mapping[K, V], keys: Container[object]) -> dict[K, V]:
    """Return the entries whose key is not among ``keys``.

    Example:
        >>> without({"lr": 0.1, "params": []}, ["params"])
        {'lr': 0.1}
    """
    return {key: value for key, value in values.items() if key not in keys}


def split_tensors(values: Mapping[K, object]) -> tuple[dict[K, Tensor], dict[K, Any]]:
    """Return the entries that are tensors, and all others."""
    tensors: dict[K, Tensor] = {}
    others: dict[K, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        else:
            others[key] = value
    return tensors, others


# The key of a dict of such values. Strategies that shard save them in shards, and load them in the current layout.
BY_PARAMETER = "by_parameter"


def find_by_parameter(state: object, path: tuple[object, ...] = ()) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the dicts under the key ``"by_parameter"`` in nested dicts, each with the keys that lead to it.

    Example:
        >>> find_by_parameter({"callbacks": {"mine": {"by_parameter": {"weight": 1}, "steps": 2}}})
        [(('callbacks', 'mine', 'by_parameter'), {'weight': 1})]
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if not isinstance(state, dict):
        return found
    for key, value in state.items():
        if key == BY_PARAMETER and isinstance(value, dict):
            found.append(((*path, key), value))
        else:
            found += find_by_parameter(value, (*path, key))
    return found


def replace_at(state: dict[Any, Any], path: tuple[object, ...], value: object) -> dict[Any, Any]:
    """Return ``state`` with another value at a path of keys; the dicts on the way are copied, and made where missing.

    Example:
        >>> replace_at({"a": {"b": 1}, "c": 2}, ("a", "b"), 3)
        {'a': {'b': 3}, 'c': 2}
    """
    first, *others = path
    if others:
        value = replace_at(state.get(first, {}), tuple(others), value)
    return {**state, first: value}
