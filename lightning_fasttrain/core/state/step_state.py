"""See, name and restore everything that a training step changes besides gradients."""

import inspect
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data import Dataset

from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.core.state.values import (
    CODE,
    DEEPEST,
    GENERATORS,
    PLAIN,
    copy_value,
    equal_tensors,
    is_foreign,
    is_same,
    memory_of,
    read_generator,
    same_changes,
    same_values,
)

_LEAVES = frozenset((*PLAIN, *CODE))
# What Lightning sets on a module, and hooks: restored, since models set them at their first forward, but not reported.
_HOOKS = sorted(name for name in vars(nn.Module()) if name.endswith("hooks"))
_OF_HOST = frozenset(vars(nn.Module())) - {"training"} | {
    "_trainer",
    "_fabric",
    "_fabric_optimizers",
    "_current_fx_name",
    "_compiled_call_impl",
    "forward",  # set by techniques, which may find their modules in a step
}
_OF_DEEPSPEED = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")  # counts of its hooks, which are not reported
_MOST_OBJECTS = 100_000  # that are visited; what a model holds is some hundreds of modules
_MOST_ITEMS = 10_000  # of a container that are visited one by one
_LARGE = 2**26  # bytes: such tensors are tables that a step mostly reads, and are copied when they are written
_SMALL = 2**22  # bytes of all tensors together: copying them takes less time than watching the operators of a step


class StepState:
    """The state of these modules at this moment; it can be restored several times.

    A walk visits all that hangs on the modules: parameters, buffers, metrics, and attributes of every submodule, in
    containers and objects of any kind. References are kept, so that restoring keeps the identity of each object.
    Buffers and other tensors are copied. Parameters and large tensors are copied only by :meth:`watch`, before the
    first operation that writes to them, so that nothing large is copied unless a step writes it.

    Args:
        modules: the modules.
        parameters: whether parameters and hooks are visited; not where a strategy moves them, as sharding ones do.
        buffers: whether buffers are visited.

    Attributes:
        unknown: names of iterators and generators, which cannot be restored.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.losses = []
        >>> state = StepState([net])
        >>> with state.watch(), torch.no_grad():
        ...     net.losses.append(0.5)
        ...     _ = net.weight.zero_()
        >>> state.changed()
        ['losses', 'weight']
        >>> state.restore()
        >>> net.losses, bool(net.weight)
        ([], True)
    """

    def __init__(self, modules: Iterable[nn.Module], *, parameters: bool = True, buffers: bool = True) -> None:
        self.unknown: list[str] = []
        self._sizes: dict[_HeldTensor, Tensor] = {}
        self._watching = ExitStack()
        self._generators = random_state()
        self._held: list[Any] = []  # each tells how it differs, and can be restored
        self._tensors: list[_HeldTensor] = []  # those with memory of their own
        self._visited: dict[int, object] = {}  # kept, so that no other object takes its id
        self._with_parameters, self._with_buffers = parameters, buffers
        roots = list(dict.fromkeys(modules))
        for place, module in enumerate(roots):
            self._visit_module(module, f"{type(module).__name__}{place}" if len(roots) > 1 else "")

    def holds(self, module: nn.Module) -> bool:
        """Whether the state of a module is part of this."""
        return id(module) in self._visited

    def restore(self) -> None:
        """Put everything back as it was, and the global random states."""
        self.restore_values()
        self.restore_generators()

    def restore_values(self) -> None:
        """Put everything back as it was that hangs on the modules."""
        for held in self._held:
            held.restore()

    def restore_generators(self) -> None:
        """Put the states of the global random generators back."""
        set_random_state(self._generators)

    @property
    def own_generators(self) -> list[Any]:
        """The generators of random numbers that hang on the modules."""
        return [held.generator for held in self._held if isinstance(held, _HeldGenerator)]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Copy a parameter or large tensor before an operation writes to it, in a context where nothing is compiled."""
        with without_compiling(), ExitStack() as self._watching:
            self._watching.enter_context(_CopyBeforeWriting(self._tensors))
            yield

    def copy_if_small(self) -> None:
        """Copy the rest at once where it is small, in :meth:`watch`, which then notes no further writes.

        Watching takes longer than all else in a step of small layers, some microseconds for each operator.
        """
        if sum(held.data.nbytes for held in self._tensors if held.copy is None) <= _SMALL:
            self.copy_all()
            self._watching.close()

    def copy_all(self) -> None:
        """Copy parameters and large tensors, too, where :meth:`watch` sees nothing, as of compiled code."""
        for held in self._tensors:
            held.keep_copy()

    def copy(self, names: Collection[str]) -> None:
        """Copy the parameters and large tensors of these names."""
        for held in self._tensors:
            if held.name in names:
                held.keep_copy()

    def note_sizes(self) -> None:
        """Note the norms of what is not copied, for :meth:`list_lost`."""
        self._sizes = self._read_sizes()

    def list_lost(self) -> list[str]:
        """Return the names of what was written but not copied, so that it cannot be restored; waits for the device.

        Found where nothing watches, as in compiled code or in a step that is timed: by the version of a tensor and,
        after :meth:`note_sizes`, by its norm.
        """
        sizes = self._read_sizes() if self._sizes else {}
        names: list[str] = []
        for held in self._tensors:
            is_resized = held in sizes and not torch.equal(sizes[held], self._sizes[held])
            if held.copy is None and (is_resized or held.has_new_version):
                names.append(held.name)
        return names

    @torch.no_grad()
    def _read_sizes(self) -> "dict[_HeldTensor, Tensor]":
        found: dict[_HeldTensor, Tensor] = {}
        for held in self._tensors:
            if held.copy is None and held.data.is_floating_point() and type(held.tensor) in (Tensor, nn.Parameter):
                found[held] = held.data
        return dict(zip(found, torch._foreach_norm(list(found.values())), strict=True)) if found else {}

    def list_unchanged_writes(self) -> list[str]:
        """Return the names of tensors that were written or replaced, with about the values that they had."""
        names = []
        for held in self._tensors:
            is_written = held.is_written and held.data.is_floating_point()
            if is_written and same_changes((held.before, held.before), (held.before, held.tensor.detach())):
                names.append(held.name)
        return names

    def move_(self, names: Sequence[str]) -> None:
        """Change these tensors by about 1%, always in the same way; :meth:`restore` puts them back."""
        noise = torch.Generator().manual_seed(0)
        for held in self._tensors:
            if held.name in names:
                held.note_write()
                factor = 1 + 0.01 * torch.randn(held.data.shape, generator=noise)
                held.data.mul_(factor.to(held.data))

    def changed(self) -> list[str]:
        """Return the names of what differs from this state."""
        return sorted(self.differences())

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Return name → the value of this state and a copy of the present one, for everything that differs."""
        found: dict[str, tuple[Any, Any]] = {}
        for held in self._held:
            for name, before, now in held.differences():
                found[name] = before, copy_value(now)
        return found

    def _visit_module(self, module: nn.Module, name: str) -> None:
        if not self._is_new(module):
            return
        prefix = f"{name}." if name else ""
        if isinstance(module, torch.jit.ScriptModule):  # whose attributes are not in a dict
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            self._visit_all(prefix, held)
            return
        own, results = vars(module), {"training": module.training}
        # Not those of wrappers such as DistributedDataParallel, which count steps and synchronizations there.
        is_layer = type(module).__module__.startswith("torch.nn.modules.")
        if is_layer or not all(map(is_foreign, type(module).__mro__)):
            results = {key: value for key, value in own.items() if key not in _OF_HOST}
        groups: list[dict[str, Any]] = [module._modules]
        if self._with_buffers:
            groups.insert(0, module._buffers)
        if self._with_parameters:
            groups.append(module._parameters)
            self._held.append(_HeldHooks(own))
        for group in groups:
            self._held.append(_HeldItems(prefix, group, group, _same_key))
        kept = _HeldItems if self._with_parameters else _HeldOnly
        self._held.append(kept(prefix, own, results, _same_key))
        for group in (*groups, results):
            self._visit_all(prefix, group)

    def _visit_all(self, prefix: str, values: Mapping[str, Any], depth: int = 0) -> None:
        for key, value in list(values.items()):
            if type(value) not in _LEAVES:  # most are plain, and their names need not be put together
                self._visit(value, f"{prefix}{key}", depth)

    def _visit(self, value: Any, name: str, depth: int = 0) -> None:
        # isinstance() last: it asks some objects, such as configurations, for their class.
        if type(value) in _LEAVES or id(value) in self._visited or isinstance(value, (*PLAIN, *CODE, Dataset)):
            return
        if depth > DEEPEST or len(self._visited) > _MOST_OBJECTS:
            return
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif self._is_new(value):
            if isinstance(value, Tensor):
                self._visit_tensor(value, name)
            elif isinstance(value, GENERATORS):
                self._held.append(_HeldGenerator(name, value))
            elif isinstance(value, np.ndarray):
                self._held.append(_HeldArray(name, value))
            else:
                self._visit_container(value, name, depth)

    def _visit_tensor(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, nn.Parameter) and not self._with_parameters:
            return  # DeepSpeed keeps them in attributes, too
        is_large = isinstance(tensor, nn.Parameter) or tensor.nbytes >= _LARGE
        held = _HeldTensor(name, tensor, copied=not is_large)
        self._held.append(held)
        if held.pointer:
            self._tensors.append(held)

    def _visit_container(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, dict):
            self._held.append(_HeldItems(name, value, value, _in_brackets))
            self._visit_each(((f"{name}[{key!r}]", item) for key, item in list(value.items())), len(value), depth)
        elif isinstance(value, list | deque | tuple):
            if not isinstance(value, tuple):
                self._held.append(_HeldSequence(name, value))
            self._visit_each(((f"{name}[{place}]", item) for place, item in enumerate(value)), len(value), depth)
        elif isinstance(value, set):
            self._held.append(_HeldSet(name, value))
        elif inspect.isgenerator(value) or (hasattr(type(value), "__next__") and not hasattr(value, "__dict__")):
            self.unknown.append(name)
        if not is_foreign(type(value)):
            self._visit_object(value, name, depth)

    def _visit_each(self, items: Iterable[tuple[str, Any]], number: int, depth: int) -> None:
        if number <= _MOST_ITEMS:
            for name, item in items:
                self._visit(item, name, depth + 1)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._held.append(_HeldItems(f"{name}.", own, own, _same_key))
            self._visit_all(f"{name}.", own, depth + 1)
        slots = list(_slots_of(type(value)))
        if slots:
            self._held.append(_HeldSlots(f"{name}.", value, slots))
            for slot in slots:
                self._visit(getattr(value, slot, None), f"{name}.{slot}", depth + 1)

    def _is_new(self, value: object) -> bool:
        if id(value) in self._visited:
            return False
        self._visited[id(value)] = value
        return True


MISSING = object()  # stands for an attribute that is not there


class _HeldTensor:
    def __init__(self, name: str, tensor: Tensor, *, copied: bool) -> None:
        self.name, self.tensor = name, tensor
        self.data = tensor.detach()  # shares memory, also after another tensor was put in its place by .data
        self.requires_grad = tensor.requires_grad
        self.pointer = _pointer_of(tensor)
        self.copy = tensor.detach().clone() if copied else None
        self.version = 0 if tensor.is_inference() else tensor._version
        self.written = False

    def note_write(self) -> None:
        """Note that an operation is about to write to it, and copy its contents."""
        self.written = True
        self.keep_copy()

    def keep_copy(self) -> None:
        """Copy its contents unless they are copied."""
        if self.copy is None:
            self.copy = self.data.clone()

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        if self.is_changed:
            yield self.name, self.before, self.tensor

    @property
    def before(self) -> Tensor:
        """Its contents as they were."""
        return self.data if self.copy is None else self.copy

    @property
    def is_changed(self) -> bool:
        """Whether its contents, memory or ``requires_grad`` differ."""
        return self._is_replaced or self.tensor.requires_grad != self.requires_grad or self._has_other_contents

    @property
    def is_written(self) -> bool:
        """Whether an operation wrote to it, be it the same values, or put other memory in its place."""
        return self.written or self._is_replaced

    @property
    def _is_replaced(self) -> bool:
        return _pointer_of(self.tensor) != self.pointer or self.tensor.shape != self.data.shape

    @property
    def _has_other_contents(self) -> bool:
        return self.copy is not None and not equal_tensors(self.data, self.copy)

    @property
    def has_new_version(self) -> bool:
        return not self.data.is_inference() and self.data._version != self.version

    def restore(self) -> None:
        with torch.no_grad():
            # Only where it was changed, since a graph that saved it takes any write for a change.
            if self._has_other_contents:
                assert self.copy is not None
                self.data.copy_(self.copy)
            if self._is_replaced:
                self.tensor.data = self.data
        if self.tensor.requires_grad != self.requires_grad and self.tensor.is_leaf:
            self.tensor.requires_grad_(self.requires_grad)


class _HeldItems:
    """A dict, or the attributes of an object as a dict.

    Args:
        prefix: of the names.
        items: the dict itself.
        before: what it holds, as far as it counts.
        join: prefix and key → name.
    """

    def __init__(
        self, prefix: str, items: dict[Any, Any], before: Mapping[Any, Any], join: Callable[[str, Any], str]
    ) -> None:
        self.prefix, self.items, self.before, self._join = prefix, items, dict(before), join
        self._ignored = frozenset() if before is items else items.keys() - before.keys()

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        for key in self._changed():
            if key not in _OF_DEEPSPEED:
                yield self._join(self.prefix, key), self.before.get(key, MISSING), self.items.get(key, MISSING)

    def _changed(self) -> list[Any]:
        changed = []
        for key in dict.fromkeys((*self.before, *self.items)):
            if not self._is_ignored(key) and not is_same(self.before.get(key, MISSING), self.items.get(key, MISSING)):
                changed.append(key)
        return changed

    def _is_ignored(self, key: object) -> bool:
        return key in self._ignored or (self._join is _same_key and key in _OF_HOST)

    def restore(self) -> None:
        changed = self._changed()
        # One by one: update() of a Counter, for instance, adds.
        for key in changed:
            self.items.pop(key, None)
        for key in changed:
            if key in self.before:
                self.items[key] = self.before[key]
        if changed and self.items.keys() == self.before.keys():
            for key in list(self.items):
                del self.items[key]
            for key, value in self.before.items():
                self.items[key] = value


class _HeldOnly(_HeldItems):
    """Leaves what was not there before: DeepSpeed sets attributes at the first forward, and needs them."""

    def _is_ignored(self, key: object) -> bool:
        return key not in self.before or super()._is_ignored(key)


class _HeldHooks:
    """The hooks of a module, without those of this package, whose techniques know that they are there."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self.own = own
        self.before = {name: dict(own[name]) for name in _HOOKS if own[name]}

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        return iter(())

    def restore(self) -> None:
        for name in _HOOKS:
            hooks, before = self.own[name], self.before.get(name, {})
            for key in [key for key, hook in hooks.items() if not _is_of_package(hook)]:
                if hooks[key] is not before.get(key):
                    del hooks[key]
            for key, hook in before.items():
                if key not in hooks and not _is_of_package(hook):
                    hooks[key] = hook


def _is_of_package(hook: object) -> bool:
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("lightning_fasttrain.")


class _HeldSequence:
    def __init__(self, name: str, sequence: list[Any] | deque[Any]) -> None:
        self.name, self.sequence, self.before = name, sequence, list(sequence)

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        if len(self.sequence) != len(self.before) or not all(map(is_same, self.sequence, self.before)):
            yield self.name, self.before, self.sequence

    def restore(self) -> None:
        if next(self.differences(), None) is not None:
            self.sequence.clear()
            self.sequence.extend(self.before)


class _HeldSet:
    def __init__(self, name: str, values: set[Any]) -> None:
        self.name, self.values, self.before = name, values, values.copy()

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        if self.values != self.before:
            yield self.name, self.before, self.values

    def restore(self) -> None:
        if self.values != self.before:
            self.values.clear()
            self.values.update(self.before)


class _HeldSlots:
    def __init__(self, prefix: str, owner: object, slots: Sequence[str]) -> None:
        self.prefix, self.owner = prefix, owner
        self.before = {slot: getattr(owner, slot, MISSING) for slot in slots}

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        for slot, value in self.before.items():
            now = getattr(self.owner, slot, MISSING)
            if not is_same(value, now):
                yield self.prefix + slot, value, now

    def restore(self) -> None:
        for name, *_ in list(self.differences()):
            slot = name.removeprefix(self.prefix)
            if self.before[slot] is MISSING:
                object.__delattr__(self.owner, slot)
            else:
                object.__setattr__(self.owner, slot, self.before[slot])


class _HeldGenerator:
    """A generator of random numbers of torch, Python or NumPy."""

    def __init__(self, name: str, generator: Any) -> None:
        self.name, self.generator = name, generator
        self.before = read_generator(generator)

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        now = read_generator(self.generator)
        if not same_values(now, self.before):
            yield self.name, self.before, now

    def restore(self) -> None:
        if isinstance(self.generator, random.Random):
            self.generator.setstate(self.before)
        elif isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = self.before
        else:
            self.generator.set_state(self.before)


class _HeldArray:
    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array, self.before = name, array, array.copy()

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        if not same_values(self.array, self.before):
            yield self.name, self.before, self.array

    def restore(self) -> None:
        self.array[...] = self.before


def without_compiling() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled: modes cannot see into compiled code."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled without it, and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class _CopyBeforeWriting(TorchDispatchMode):
    """Copies a tensor before the first operation that writes to its storage, through whatever view.

    The version of a tensor does not tell: ``parameter.data.lerp_()``, the usual way to write a teacher, leaves it. One
    storage may hold several tensors, such as the weights of an LSTM on a GPU.
    """

    def __init__(self, watched: Iterable[_HeldTensor]) -> None:
        super().__init__()
        self._watched: defaultdict[int, list[tuple[int, int, _HeldTensor]]] = defaultdict(list)
        for held in watched:
            storage, start, end = memory_of(held.data)
            self._watched[storage].append((start, end, held))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # function modes have seen what the step called, and come before this
            if func._schema.is_mutable:
                for value in tree_iter((args, kwargs)):
                    if isinstance(value, Tensor):
                        self._note_write(value)
            return func(*args, **(kwargs or {}))

    def _note_write(self, written: Tensor) -> None:
        storage, start, end = memory_of(written)
        for held_start, held_end, held in self._watched.get(storage, ()):
            if start < held_end and held_start < end:
                held.note_write()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is entered where nothing is compiled, and the guard against it takes 50 µs


def _pointer_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor; 0 where it has none of its own."""
    if isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _slots_of(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__weakref__", "__dict__"):
                yield f"_{each.__name__.lstrip('_')}{slot}" if slot.startswith("__") else slot


def _same_key(prefix: str, key: object) -> str:
    return f"{prefix}{key}"


def _in_brackets(prefix: str, key: object) -> str:
    return f"{prefix}[{key!r}]"
