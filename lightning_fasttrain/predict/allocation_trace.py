"""Every tensor that a step on fake tensors would allocate: how large, what for, by whom, from when until when."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.predict.data_dependent_values import AssumedNumbers

FOR_EVER = 2**62

Workspace = Callable[[Sequence[Any], Any], int]
Kept = Callable[[Sequence[Any], Any], tuple[Tensor, int]]


@dataclass
class Allocation:
    """One storage.

    Args:
        nbytes: its size, as the device's allocator rounds it.
        module: qualified name of the module at work, or of the owner of a parameter; "" outside of all.
        op: the operation that made it.
        phase: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer step"``.
        born: time, in events of the trace.
        died: likewise.
        known: its category, if it has been told; see :meth:`category`.
        period: count of stretches of forward work and of other work, at birth.
        outlived: whether it was still there when another stretch had begun.
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
    def category(self) -> str:
        """Activations are what a forward, or a recomputation, leaves for the backward; all else is temporary."""
        if self.known is not None:
            return self.known
        return "activations" if self.phase in ("forward", "recomputation") and self.outlived else "temporaries"


class AllocationTrace(AssumedNumbers):
    """Notes every storage that operations make, and when the last tensor on it is gone.

    Enter it inside a ``FakeTensorMode``, whose tensors have sizes and lifetimes but no memory.

    Args:
        granule: allocations are rounded up to a multiple of so many bytes.
        workspace: operation → (arguments, result) → bytes that its kernel allocates for itself, which a fake run
            does not see.
        kept: operation → (arguments, result) → the tensor in the result that is larger than a fake run makes it,
            and how large.
        truth: see :class:`AssumedNumbers`.

    Attributes:
        allocations: in the order of birth.

    Source:
        ``torch.distributed._tools.mem_tracker.MemTracker`` follows storages in the same way and keeps running sums;
        here the lifetimes are kept, so that categories and peaks are found when all is known.
    """

    def __init__(
        self,
        granule: int = 1,
        workspace: Mapping[Any, Workspace] | None = None,
        kept: Mapping[Any, Kept] | None = None,
        truth: bool = True,
    ) -> None:
        super().__init__(truth)
        self.granule = granule
        self.workspace, self.kept = workspace or {}, kept or {}
        self.allocations: list[Allocation] = []
        self.now = 0
        self.phase = "forward"
        self._alive: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._period = 0
        self._in_forward = True
        self._inside: list[str] = []
        self._module_of_node: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question, and autograd asks it at every node
            return func(*args)
        phase, module = self._phase(), self._module()
        if self._in_forward != (phase in ("forward", "recomputation")):
            self._in_forward, self._period = not self._in_forward, self._period + 1
        if phase == "forward":  # autograd has just numbered the node that will run this operation's backward, if any
            self._module_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, module)
        op = str(func.overloadpacket).removeprefix("aten.")
        result = self.answer(func, args, kwargs or {})
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _has_storage(tensor):
                self._note(tensor, module, op, phase)
        if func in self.kept:
            tensor, nbytes = self.kept[func](args, result)
            self._note(tensor, module, op, phase).nbytes = self._round_up(nbytes)
        if func in self.workspace:
            self._note_workspace(self.workspace[func](args, result), module, op, phase)
        return result

    def _phase(self) -> str:
        # The engine runs nodes without gradients, and checkpointing switches them on to run a block once more.
        recomputing = self.phase == "backward" and torch.is_grad_enabled() and _current_node() is not None
        return "recomputation" if recomputing else self.phase

    def _module(self) -> str:
        if self._inside:
            return self._inside[-1]
        # No hook tells of modules in a backward; the node tells which operation of the forward it belongs to.
        node = _current_node()
        return self._module_of_node.get(node._sequence_nr(), "") if node is not None else ""

    def _note(self, tensor: Tensor, module: str, op: str, phase: str) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata  # of the memory itself, which all views share
        if key in self._alive:
            return self._alive[key][1]
        if tensor.device.type != "cpu":
            why = "a prediction runs on the CPU, whatever device it is for"
            way_out = "Make tensors where the module is (module.device, tensor.device)"
            raise ValueError(explain(f"{op} in {module or 'the step'} made a tensor on {tensor.device}", why, way_out))
        allocation = self._allocate(storage.nbytes(), module, op, phase)
        self._alive[key] = (weakref.ref(storage, partial(self._forget, key)), allocation)
        return allocation

    def _note_workspace(self, nbytes: int, module: str, op: str, phase: str) -> None:
        allocation = self._allocate(nbytes, module, f"{op} (workspace)", phase)
        self.now += 1
        allocation.died, allocation.outlived = self.now, False  # gone when its kernel ends

    def _allocate(self, nbytes: int, module: str, op: str, phase: str) -> Allocation:
        self.now += 1
        self.allocations.append(Allocation(self._round_up(nbytes), module, op, phase, self.now, self._period))
        return self.allocations[-1]

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self.granule) * self.granule

    def _forget(self, key: int, _: weakref.ref[Any]) -> None:
        self.now += 1
        allocation = self._alive.pop(key)[1]
        allocation.died, allocation.outlived = self.now, allocation.period != self._period

    def mark(self, tensor: Tensor, category: str, module: str = "") -> None:
        """Say what the storage of ``tensor`` is for."""
        if _has_storage(tensor):
            allocation = self._note(tensor, module, "", self.phase)
            allocation.known, allocation.module = category, module or allocation.module

    def mark_all(self, batch: Any, category: str) -> Any:
        """``batch``, with every tensor in it marked."""

        def mark(tensor: Tensor) -> Tensor:
            self.mark(tensor, category)
            return tensor

        return apply_to_collection(batch, Tensor, mark)

    def reserve(self, nbytes: int, op: str) -> None:
        """Count ``nbytes`` that are there from now on and belong to no tensor."""
        self._allocate(nbytes, "", op, self.phase).known = "temporaries"

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Know which module is at work, and what is a gradient of ``model``."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                # Always: checkpointing ends a recomputation early by raising, out of modules that have been entered.
                hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for name, parameter in model.named_parameters():
                self.mark(parameter, "parameters", name)
                if parameter.requires_grad:
                    hook = partial(self._mark_gradient, name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            for name, tensor in (*model.named_buffers(), *quantized_tensors(model)):
                self.mark(tensor, "parameters", name)
            yield

    def _enter(self, name: str, *_: object) -> None:
        self._inside.append(name)

    def _leave(self, *_: object) -> None:
        self._inside.pop()

    def _mark_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, "gradients", name)


def _has_storage(tensor: Tensor) -> bool:
    """A sparse tensor has none itself; its indices and values are seen when they are made."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _current_node() -> Any:
    return torch._C._current_autograd_node()
