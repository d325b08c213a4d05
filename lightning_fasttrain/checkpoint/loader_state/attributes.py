"""Attributes of datasets and samplers that change in a run, as plain values: epochs, counters, generators."""

import functools
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, get_worker_info

from lightning_fasttrain.core.host.loader_wrapper import find_innermost
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.values import CODE, is_foreign, same_values

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MAKERS: dict[str, Any] = {kind.__name__: kind for kind in (*_CONTAINERS, torch.Generator, random.Random)}
_MAKERS |= {"numpy.Generator": np.random.default_rng, "RandomState": np.random.RandomState}
_MOST_ITEMS = 256  # of a container; larger ones hold data
_MOST_VALUES = 1000  # that are read of the objects together
_LARGEST = 2**20  # bytes of a tensor or array
_LARGEST_ITEM = 2**14  # bytes of those in containers
_SOME = 64  # entries of a large value that are compared
_DEEPEST = 6
_LEFT_OUT = "left out"  # the kind of a value that a checkpoint cannot hold
_OBJECT = ("object",)  # stands for an object with attributes
# Packages of tokenizers, tables and images, which have many attributes, but none that a run changes.
_WITHOUT_STATE = frozenset(
    ("transformers", "tokenizers", "pandas", "pyarrow", "datasets", "PIL", "h5py", "lmdb", "zarr")
)
_ELSEWHERE = (nn.Module, Trainer, LightningDataModule, DataLoader)  # whose state is saved by others
_MISSING = object()


class Attributes:
    """The attributes of some objects, and of all objects that hang on them, compared with how they began.

    A run that resumes makes its datasets and samplers as the saved run did; what has changed since then is part of the
    run's state. The states of random generators, and the seeds of distributed samplers, always are, since they may
    begin differently in each process. Values that a checkpoint cannot hold, such as open files and large caches, are
    left out; where an object has one, its flags are left out too, since one may tell that the file is open.

    Args:
        roots: datasets and samplers.
        began: what :attr:`began` was in the process that made this one as its worker; as now by default.
        only_generators: whether all other attributes are left out; or the places of the roots of which they are.

    Attributes:
        began: path → plain value of each attribute.

    Example:
        >>> class Rows(Dataset):
        ...     epoch = 0
        >>> rows = Rows()
        >>> attributes = Attributes([rows])
        >>> rows.epoch = 2
        >>> attributes.changes()
        {'0': 'Rows', '0.epoch': 2}
        >>> attributes.restore({})
        >>> rows.epoch
        0
    """

    def __init__(
        self, roots: Iterable[object], began: Mapping[str, Any] | None = None, *, only_generators: bool | str = False
    ) -> None:
        self.roots, self.only_generators = list(roots), only_generators
        self.began = self._read() if began is None else dict(began)
        self._unwritten: dict[str, tuple[Tensor, int]] = {}

    def _read(self) -> dict[str, Any]:
        owners, leaves = self._walk()
        values = {path: _to_plain(leaf.value) for path, leaf in leaves.items()}
        return values | dict.fromkeys(owners, _OBJECT)

    def _walk(self) -> tuple[dict[str, dict[str, Any]], dict[str, "_Leaf"]]:
        owners, leaves = _walk(self.roots)
        if get_worker_info() is not None:
            # What workers share with the loading process is restored there.
            leaves = {path: leaf for path, leaf in leaves.items() if not _is_shared(leaf.value)}
        if self.only_generators:
            place = "" if self.only_generators is True else self.only_generators
            owners = {path: owner for path, owner in owners.items() if not path.startswith(place)}
            leaves = {key: leaf for key, leaf in leaves.items() if leaf.differs_by_process or not key.startswith(place)}
        return owners, leaves

    def changes(self) -> dict[str, Any]:
        """Return path → plain value of what has changed, and of what is left out; place → class of each root."""
        owners, leaves = self._walk()
        changed: dict[str, Any] = {}
        for path, leaf in leaves.items():
            began = self.began.get(path, _MISSING)
            if (leaf.value is began and type(began) in _SCALARS) or self._is_unwritten(path, leaf.value):
                continue
            value = _to_plain(leaf.value)
            if leaf.differs_by_process or not are_equal(value, began):
                changed[path] = value
            elif isinstance(leaf.value, Tensor) and not leaf.value.is_inference():
                self._unwritten[path] = leaf.value, leaf.value._version
        for path in owners:
            if self.began.get(path) != _OBJECT:  # made in the run
                changed[path] = _LEFT_OUT, "object", None
        unsure = {path.rpartition(".")[0] for path, value in changed.items() if is_left_out(value)}
        if unsure:
            flags = [path for path, value in changed.items() if isinstance(value, bool)]
            for path in flags:
                if path.rpartition(".")[0] in unsure:
                    del changed[path]
        return self._classes() | changed if changed else {}

    def _is_unwritten(self, path: str, value: object) -> bool:
        """Whether a tensor has not been written to since it was found to be as it began; not if others can write it."""
        if not isinstance(value, Tensor) or value.is_inference() or _is_shared(value):
            return False
        tensor, version = self._unwritten.get(path, (None, 0))
        return tensor is value and version == value._version

    def _classes(self) -> dict[str, str]:
        return {str(place): type(root).__name__ for place, root in enumerate(self.roots)}

    def restore(self, changes: Mapping[str, Any], *, strict: bool = True) -> None:
        """Set all attributes to how they began, but for ``changes``, except what is left out.

        Args:
            changes: what :meth:`changes` returned.
            strict: whether it is an error if they are of other classes; otherwise those are not used.

        Raises:
            ValueError: for other classes, if ``strict``.
        """
        classes = self._classes()
        others = [place for place, name in classes.items() if changes.get(place, name) != name]
        if others and strict:
            what = f"the data are read by {classes[others[0]]}, and by {changes[others[0]]} in the saved run"
            why = "their states do not fit each other"
            raise ValueError(explain(what, why, "Make the loader as in the saved run"))
        changes = {path: value for path, value in changes.items() if path.partition(".")[0] not in others}
        for path, leaf in self._walk()[1].items():
            value = changes.get(path, self.began.get(path, _MISSING))
            if value is _MISSING and isinstance(leaf.owner, dict):
                leaf.owner.pop(leaf.key)
            elif value is not _MISSING and not is_left_out(value) and not are_equal(value, _to_plain(leaf.value)):
                _write(leaf.owner, leaf.key, value)
        owners, leaves = _walk(self.roots)
        for path in changes.keys() - leaves.keys() - classes.keys():  # set for the first time in the saved run
            owner, _, name = path.rpartition(".")
            if owner in owners and not is_left_out(changes[path]):
                owners[owner][name] = _from_plain(changes[path])


_watched: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # root → how it began, when first seen


def watch_attributes(loader: Any, *, without_dataset: bool = False) -> Attributes:
    """Return the attributes of the dataset and samplers of a loader, compared with when they were first watched.

    A loader that is made anew for each epoch, or for another run in this process, may have the same dataset.

    Args:
        loader: any loader.
        without_dataset: whether to leave out the attributes of the dataset other than generators.
    """
    loader = find_innermost(loader)
    roots = [loader]
    if isinstance(loader, DataLoader):
        roots = [loader.dataset, loader.batch_sampler, loader.sampler, _Holder(loader.generator)]
    began: dict[str, Any] = {}
    for place, root in enumerate(roots):
        values = _watched.get(root) if _can_be_key(root) else None
        if values is None:
            values = Attributes([root]).began
            if _can_be_key(root):
                _watched[root] = values
        began |= {f"{place}{path[1:]}": value for path, value in values.items()}
    return Attributes(roots, began, only_generators="0" if without_dataset else False)


class _Holder(Dataset[Any]):
    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator


def _can_be_key(value: object) -> bool:
    return hasattr(value, "__weakref__") and type(value).__hash__ is object.__hash__


class _Leaf(NamedTuple):
    owner: Any  # a dict or list
    key: Any
    value: Any
    differs_by_process: bool


def _walk(roots: list[Any]) -> tuple[dict[str, dict[str, Any]], dict[str, _Leaf]]:
    """Return path → attributes of each object, and path → place and value of each attribute, the nearest first."""
    owners: dict[str, dict[str, Any]] = {}
    leaves: dict[str, _Leaf] = {}
    seen: set[int] = set()
    waiting = deque((str(place), root, 0) for place, root in enumerate(roots) if _is_followed(root))
    while waiting and len(leaves) < _MOST_VALUES:
        path, value, depth = waiting.popleft()
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        owner: Any = value
        if not isinstance(value, _CONTAINERS):
            owner = owners[path] = vars(value)
        for key, item in _items(owner):
            place = f"{path}.{key}"
            if _is_followed(item):
                waiting.append((place, item, depth + 1))
            elif isinstance(owner, dict | list) or isinstance(item, _GENERATORS):
                is_seed = isinstance(value, DistributedSampler) and key == "seed"
                leaves[place] = _Leaf(owner, key, item, is_seed or isinstance(item, _GENERATORS))
    return owners, leaves


def _items(owner: Any) -> list[tuple[Any, Any]]:
    # A list, made at once: a thread of the dataset may be filling the container.
    return list(owner.items() if isinstance(owner, dict) else enumerate(owner))


def _is_followed(value: Any) -> bool:
    """Whether it is an object with attributes of its own, or a container that holds such or generators."""
    kind = type(value)
    if kind in _SCALARS:
        return False
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST_ITEMS:
            return False
        return any(isinstance(item, _GENERATORS) or _is_followed(item) for _, item in _items(value))
    return _is_followed_kind(kind) and isinstance(getattr(value, "__dict__", None), dict)


@functools.lru_cache(maxsize=1024)
def _is_followed_kind(kind: type) -> bool:
    if issubclass(kind, (*CODE, *_ELSEWHERE, *_GENERATORS, Tensor, np.ndarray, np.generic)):
        return False
    if issubclass(kind, Dataset | Sampler):
        return True
    return not is_foreign(kind) and kind.__module__.partition(".")[0] not in _WITHOUT_STATE


def _is_shared(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.is_shared()  # a sparse tensor has no storage of its own
    return isinstance(value, Synchronized)


def is_left_out(value: object) -> bool:
    """Whether this stands for a value that a checkpoint cannot hold."""
    return isinstance(value, tuple) and value[0] in (_LEFT_OUT, *_OBJECT)


def is_generator(value: object) -> bool:
    """Whether this is the state of a random generator."""
    return isinstance(value, tuple) and value[0] == "generator"


def are_equal(one: Any, other: Any) -> bool:
    """Whether two plain values are equal."""
    if is_generator(one) and is_generator(other):
        state, its_state = one[2], other[2]
        return torch.equal(state, its_state) if isinstance(state, Tensor) else state == its_state
    return same_values(one, other)


def _to_plain(value: Any, largest: int = _LARGEST) -> Any:
    """Return a copy that is made of tensors and plain values: a scalar, or a tuple of a kind and contents."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Synchronized):
        return "shared", value.value
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and value.nbytes <= largest:
            return "tensor", value.detach().clone()
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "biufc" and value.nbytes <= largest:
            return ("array" if isinstance(value, np.ndarray) else "scalar"), torch.from_numpy(np.array(value))
    elif isinstance(value, _GENERATORS):
        maker = "numpy.Generator" if isinstance(value, np.random.Generator) else kind.__name__
        return "generator", maker, _generator_state(value)
    elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS:
        plain = [(_to_plain(key), _to_plain(item, _LARGEST_ITEM)) for key, item in _items(value)]
        if not any(is_left_out(key) or is_left_out(item) for key, item in plain):
            container = next(each for each in _CONTAINERS if isinstance(value, each))
            return container.__name__, plain
    return _LEFT_OUT, kind.__name__, _read_some(value)


def _read_some(value: Any) -> Any:
    """Return something that is likely to change with the contents of a large value, such as the order of its items."""
    if isinstance(value, list | tuple):
        some = value[:: len(value) // _SOME + 1]
        return len(value), repr([item for item in some if type(item) in _SCALARS])
    if isinstance(value, _CONTAINERS):
        return len(value)
    if not isinstance(value, Tensor | np.ndarray):
        return None
    if isinstance(value, Tensor):
        is_read = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()
    else:
        is_read = value.dtype.kind in "biufcSU" and value.flags.c_contiguous
    if not is_read:
        return tuple(value.shape)
    return tuple(value.shape), repr(value.reshape(-1)[:: math.prod(value.shape) // _SOME + 1].tolist())


def _from_plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if is_generator(value):
        generator = _MAKERS[value[1]]()
        _set_generator_state(generator, value[2])
        return generator
    kind, contents = value
    if kind == "tensor":
        return contents.clone()
    if kind in ("array", "scalar"):
        array = contents.clone().numpy()
        return array if kind == "array" else array[()]
    items = [(_from_plain(key), _from_plain(item)) for key, item in contents]
    if kind == "dict":
        return dict(items)
    return _MAKERS[kind](item for _, item in items)


def _write(owner: Any, key: Any, value: Any) -> None:
    """Set a value in place where others may hold it too, such as a tensor in shared memory."""
    now = owner[key]
    if is_generator(value) and isinstance(now, _GENERATORS):
        _set_generator_state(now, value[2])
        return
    if isinstance(now, Synchronized):
        now.value = value[1]
        return
    new = _from_plain(value)
    if isinstance(now, Tensor) and isinstance(new, Tensor) and now.shape == new.shape:
        now.detach().copy_(new)
    elif isinstance(now, np.ndarray) and isinstance(new, np.ndarray) and now.shape == new.shape:
        now[...] = new
    elif isinstance(now, dict | set) and isinstance(new, dict | set):
        now.clear()
        now.update(new)
    elif isinstance(now, list | deque) and isinstance(new, list | deque):
        now.clear()
        now.extend(new)
    else:
        owner[key] = new


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator as a tensor, or as plain numbers, lists and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    # weights_only=True cannot read NumPy arrays, which some of these states hold.
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _without_arrays(generator.get_state(legacy=False))
    return generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))  # setstate accepts only a tuple


def _without_arrays(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
