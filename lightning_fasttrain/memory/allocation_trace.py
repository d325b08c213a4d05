"""Trace every allocation of a step on fake tensors: size, category, operation and lifetime."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._mode_utils import no_dispatch

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import CallKey, is_strided, run_cached, takes_no_tensor
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.memory.fake_operators import AssumedNumbers, is_sharded, run_on_shards

FOR_EVER = 2**62
# References to a tensor and its storage that dispatch to Python holds, if the sum of gradients alone refers to them.
_REFERENCES, _STORAGE_REFERENCES = 4, 2
_DEVICE = torch.ops.prim.device.default

_WAITS = {torch.ops._c10d_functional.wait_tensor.default}
_UNKNOWN = CallKey(None, [])
_RESIZE = torch.UntypedStorage.resize_
_FIND_SHAPES = ShardingPropagator._propagate_tensor_meta_non_cached

Workspace = Callable[[Sequence[Any], Any], int]
Kept = Callable[[Sequence[Any], Any], tuple[Tensor, int]]


# An operator, its positional arguments and those by name.
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]


class Recorder:
    """Takes note of the operators that a trace runs, such as of their FLOPs; this one of nothing."""

    def begin_step(self) -> None:
        """Discard the step that was recorded last, if it is not finished."""

    def watch(self, model: nn.Module) -> None:
        """Take note of the model before its first step."""

    def note(self, trace: "AllocationTrace", call: Call, result: object, phase: str, module: str) -> None:
        """Take note of an operator that has just run."""

    def note_gradient(self, gradient: Tensor) -> None:
        """Take note that a gradient is complete."""

    def note_memory(self, allocations: "Sequence[Allocation]", since: int) -> None:
        """Take note of the allocations of a finished trace on one rank, of which the last step began at ``since``."""

    def finish(self, micro_batches: int, batches: int, rank: object) -> None:
        """Keep the step that was recorded last, of ``rank``, with the numbers of a real step."""


@dataclass
class Allocation:
    """Allocation of one storage.

    Args:
        nbytes: its size, as the device's allocator rounds it.
        module: qualified name of the running module, or of the owner of a parameter; "" outside of all modules.
        op: the operation that allocated it.
        phase: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer step"``.
        born: time of allocation, in events of the trace.
        died: time at which it was freed.
        known: its category, if it was set; see :meth:`category`.
        period: index of the interval of forward or other work in which it was allocated.
        outlived: whether it still existed when the next interval began.
    """

    nbytes: int
    module: str
    op: str
    phase: str
    born: int
    period: int
    died: int = FOR_EVER
    known: str | None = None
    outlived: bool = True

    @property
    def alive(self) -> bool:
        """Whether it is not freed yet."""
        return self.died == FOR_EVER

    @property
    def category(self) -> str:
        """Activations are what a forward or recomputation keeps for the backward; everything else is temporary."""
        if self.known is not None:
            return self.known
        if self.phase in ("forward", "recomputation") and self.outlived:
            return "activations"
        return "temporaries"


class AllocationTrace(AssumedNumbers):
    """Records every storage that operations allocate, and when the last tensor on it is freed.

    Enter it inside a ``FakeTensorMode``, whose tensors have sizes and lifetimes but no memory.

    Args:
        multiple: allocations are rounded up to a multiple of this many bytes.
        workspace: operation → (arguments, result) → bytes of workspace that its kernel allocates, invisible to a
            fake run.
        kept: operation → (arguments, result) → the tensor in the result that is larger than in a fake run, and its
            size in bytes.
        recorder: takes note of the operators.
        assume: settings of :class:`AssumedNumbers`.

    Attributes:
        allocations: all allocations, in order of birth.
        key: what decided the result of the operator that has just run, while it is noted.
        micro_batches: number of micro-batches of the step, of which two at most are traced.

    Source:
        ``torch.distributed._tools.mem_tracker.MemTracker`` follows storages in the same way and keeps running sums;
        here lifetimes are kept, so that categories and peaks can be computed at the end.
    """

    def __init__(
        self,
        multiple: int = 1,
        workspace: Mapping[Any, Workspace] | None = None,
        kept: Mapping[Any, Kept] | None = None,
        recorder: Recorder | None = None,
        **assume: Any,
    ) -> None:
        super().__init__(**assume)
        self.multiple = multiple
        self.workspace, self.kept = workspace or {}, kept or {}
        self.recorder = recorder or Recorder()
        self.micro_batches = 1
        self.key = _UNKNOWN
        self.allocations: list[Allocation] = []
        self.now = 0
        self.phase = "forward"
        self._alive: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._period = 0
        self._in_forward = True
        self._finds_shapes = False
        self._inside: list[tuple[str, int | None]] = []  # running modules, and the node that runs their recomputation
        self._module_of_node: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd queries the device at every node, which allocates nothing.
        if func is _DEVICE:
            return args[0].device if type(args[0]) is FakeTensor else func(*args)
        if takes_no_tensor(func):
            with no_dispatch():
                return func(*args, **(kwargs or {}))
        if self._finds_shapes:
            return func(*args, **(kwargs or {}))
        if is_sharded(types):
            # Where it is not implemented, the tensor's class calls operations on this rank's part, which are traced.
            return run_on_shards(func, args, kwargs or {}, self.__torch_dispatch__)
        phase, module = self._phase(), self._module()
        if self._in_forward != (phase in ("forward", "recomputation")):
            self._in_forward, self._period = not self._in_forward, self._period + 1
        # Autograd has just numbered the node that will run this operation's backward, if any.
        if phase == "forward":
            self._module_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, module)
        op = _name_operator(func)
        if phase == "backward" and func is torch.ops.aten.add.Tensor and _sums_in_place(*args):
            func = torch.ops.aten.add_.Tensor
        # A fake one returns a new tensor, a real one its argument.
        result = args[0] if func in _WAITS else self.answer(func, args, kwargs or {})
        # In a backward, function modes would be asked for each attribute of a tensor.
        with torch._C.DisableTorchFunction():
            self._note_memory(func, args, result, module, op, phase)
        self.recorder.note(self, (func, args, kwargs or {}), result, phase, module)
        self.key = _UNKNOWN  # it refers to the arguments, which may be freed now
        return result

    def _note_memory(
        self, func: object, args: Sequence[object], result: object, module: str, op: str, phase: str
    ) -> None:
        for tensor in _tensors_of(result):
            if _has_storage(tensor):
                self._note(tensor, module, op, phase)
        if func in self.kept:
            tensor, nbytes = self.kept[func](args, result)
            self._note(tensor, module, op, phase).nbytes = self._round_up(nbytes)
        if func in self.workspace:
            self._note_workspace(self.workspace[func](args, result), module, op, phase)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a trace runs where nothing is compiled, and the guard against it takes 50 µs

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result, self.key = run_cached(func, args, kwargs)
        return result

    def _phase(self) -> str:
        # The engine runs nodes without gradients, and checkpointing enables them to recompute a block.
        if self.phase == "backward" and torch.is_grad_enabled() and _current_node() is not None:
            return "recomputation"
        return self.phase

    def _module(self) -> str:
        number = _number_of_node()
        self._forget_ended(number)
        if self._inside:
            return self._inside[-1][0]
        # Hooks do not report modules in a backward, but the node identifies its forward operation.
        return "" if number is None else self._module_of_node.get(number, "")

    def _forget_ended(self, number: int | None) -> None:
        """Forget modules in which the recomputation of another node has ended, which skips their hooks."""
        while self._inside and self._inside[-1][1] not in (None, number):
            self._inside.pop()

    def _note(self, tensor: Tensor, module: str, op: str, phase: str) -> Allocation:
        storage = tensor.untyped_storage()
        # The key identifies the memory, which all views share.
        key = storage._cdata
        if key in self._alive:
            return self._alive[key][1]
        if tensor.device.type != "cpu":
            why = "a prediction runs on the CPU, whatever device it predicts"
            way_out = "Create tensors on the device of the module (module.device, tensor.device)"
            raise ValueError(explain(f"{op} in {module or 'the step'} made a tensor on {tensor.device}", why, way_out))
        allocation = self._allocate(storage.nbytes(), module, op, phase)
        self._alive[key] = (weakref.ref(storage, partial(self._forget, key)), allocation)
        return allocation

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> Any:
        """Resize a storage, as FSDP2 does to free gathered parameters and to gather them again."""
        result = _RESIZE(storage, nbytes)
        reference, before = self._alive.get(storage._cdata, (None, None))
        if before is not None:
            self._end(before)
        allocation = self._allocate(nbytes, self._module(), "resize_", self._phase())
        allocation.known = "parameters"
        if reference is None:
            reference = weakref.ref(storage, partial(self._forget, storage._cdata))
        self._alive[storage._cdata] = (reference, allocation)
        return result

    def _find_shapes(self, *args: Any) -> Any:
        """Run an operator on the shapes of whole tensors, as :class:`DTensor` does once for each; no step does so."""
        self._finds_shapes = True
        try:
            return _FIND_SHAPES(*args)
        finally:
            self._finds_shapes = False

    def _note_workspace(self, nbytes: int, module: str, op: str, phase: str) -> None:
        allocation = self._allocate(nbytes, module, f"{op} (workspace)", phase)
        self.now += 1
        allocation.died, allocation.outlived = self.now, False  # freed when its kernel ends

    def _allocate(self, nbytes: int, module: str, op: str, phase: str) -> Allocation:
        self.now += 1
        self.allocations.append(Allocation(self._round_up(nbytes), module, op, phase, self.now, self._period))
        return self.allocations[-1]

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self.multiple) * self.multiple

    def _forget(self, key: int, _: weakref.ref[Any]) -> None:
        self._end(self._alive.pop(key)[1])

    def _end(self, allocation: Allocation) -> None:
        self.now += 1
        allocation.died, allocation.outlived = self.now, allocation.period != self._period

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation that ``tensor`` is on; None if it was not traced."""
        return self._alive.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def not_stored(self, tensor: Tensor) -> None:
        """Take ``tensor`` for a value in registers, which takes no memory."""
        with torch._C.DisableTorchFunction():
            allocation = self.allocation_of(tensor)
        if allocation is not None:
            allocation.nbytes = 0

    def mark(self, tensor: Tensor, category: str, module: str = "") -> None:
        """Set the category of the storage of ``tensor``, or of this rank's part of it."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if _has_storage(tensor):
            allocation = self._note(tensor, module, "", self.phase)
            allocation.known, allocation.module = category, module or allocation.module

    def mark_all(self, batch: Any, category: str) -> Any:
        """Set the category of every tensor in ``batch``, and return ``batch``."""

        def mark(tensor: Tensor) -> Tensor:
            self.mark(tensor, category)
            return tensor

        return apply_to_collection(batch, Tensor, mark)

    def reserve(self, nbytes: int, op: str) -> None:
        """Add an allocation of ``nbytes`` that belongs to no tensor and is never freed."""
        self._allocate(nbytes, "", op, self.phase).known = "temporaries"

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Track the running module, and the gradients of ``model``."""
        self.recorder.watch(model)
        with ExitStack() as hooks:
            hooks.enter_context(patched(torch.UntypedStorage, "resize_", lambda *args: self._resize(*args)))
            find_shapes = patched(ShardingPropagator, _FIND_SHAPES.__name__, lambda *args: self._find_shapes(*args))
            hooks.enter_context(find_shapes)
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                # Always called: torch's checkpoint ends a recomputation with an exception inside of entered modules.
                leave = partial(self._leave, name)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            for name, parameter in model.named_parameters():
                self.mark(parameter, "parameters", name)
                if parameter.requires_grad:
                    hook = partial(self._mark_gradient, name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            for name, tensor in (*model.named_buffers(), *quantized_tensors(model)):
                self.mark(tensor, "parameters", name)
            yield

    def _enter(self, name: str, *_: object) -> None:
        number = _number_of_node()
        self._forget_ended(number)
        self._inside.append((name, number))

    def _leave(self, name: str, *_: object) -> None:
        number = _number_of_node()
        self._forget_ended(number)
        if self._inside and self._inside[-1] == (name, number):  # else forgotten by a backward inside of it
            self._inside.pop()

    def _mark_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, "gradients", name)
            self.recorder.note_gradient(parameter.grad)


def _sums_in_place(total: object, part: object, *_: object) -> bool:
    """Whether autograd would add the gradient ``part`` of a tensor to ``total`` in place, if these were not fake.

    It does so if nothing else refers to ``total``. Without sums in place, the peak of Mamba would be 8% too high; with
    all of them in place, that of PEFT's LoRA in recomputed blocks 9% too low, as
    ``test_the_peak_with_an_adapter_is_predicted_within_five_per_cent`` shows.

    Source:
        ``can_accumulate_inplace`` in torch's ``input_buffer.cpp``.
    """
    if not isinstance(part, Tensor) or part.shape != total.shape or isinstance(_current_node(), BackwardCFunction):
        return False
    storage = total.untyped_storage()
    if total._use_count() > _REFERENCES or torch._C._storage_Use_Count(storage._cdata) > _STORAGE_REFERENCES:
        return False
    return total.dtype == part.dtype and total.nbytes == storage.nbytes()


@cache
def _name_operator(func: object) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _tensors_of(result: object) -> Iterator[Tensor]:
    """Yield the tensors among the results of an operator."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors_of(part)


def _has_storage(tensor: Tensor) -> bool:
    """Whether the tensor has a storage. Sparse tensors have none; their indices and values are seen when created."""
    return is_strided(tensor) and tensor.device.type != "meta"


def _current_node() -> Any:
    return torch._C._current_autograd_node()


def _number_of_node() -> int | None:
    """Return the number of the node whose backward runs; None outside of a backward."""
    node = _current_node()
    return None if node is None else node._sequence_nr()
