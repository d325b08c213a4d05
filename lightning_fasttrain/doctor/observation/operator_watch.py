"""See each operator of a step by dispatch: host syncs, copies, float64, large results, and tensors that stay alive."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lightning_fasttrain.doctor.observation.operator_costs import OperatorCosts
from lightning_fasttrain.doctor.observation.source_lines import Call, SourceLine, find_call
from lightning_fasttrain.step_time.record_step import RecordedStep, note_call


@dataclass
class ModuleCall:
    """A module that was called in a training step.

    Attributes:
        module: the module.
        line: line of the user's code that called it.
        was_training: its mode.
        samples: size of the first dimension of its first argument; 0 if that is not a tensor.
    """

    module: nn.Module
    line: SourceLine | None
    was_training: bool
    samples: int


class ModuleWatch:
    """Notes the modules that are called while it runs, and dropout that is active without gradients."""

    def __init__(self) -> None:
        self.called: dict[int, ModuleCall] = {}
        self.active_dropout: dict[SourceLine, str] = {}
        self._handle: RemovableHandle | None = None
        self._dropouts: list[RemovableHandle] = []

    def start(self, models: list[nn.Module]) -> None:
        """Start noting all modules; dropout of ``models`` is noted until :meth:`close`."""
        self._handle = register_module_forward_pre_hook(self._note)
        if self._dropouts:
            return
        for model in models:
            for module in model.modules():
                if isinstance(module, _DropoutNd):
                    self._dropouts.append(module.register_forward_pre_hook(self._note_dropout))

    def stop(self) -> None:
        """Stop noting all modules."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        """Remove all hooks."""
        self.stop()
        for handle in self._dropouts:
            handle.remove()
        self._dropouts.clear()

    def _note(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        # While the compiler traces a forward, its hooks are traced too.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or id(module) in self.called:
            return
        samples = 0
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() > 1:
            samples = len(inputs[0])
        line = find_call(sys._getframe(1)).line
        self.called[id(module)] = ModuleCall(module, line, module.training, samples)

    def _note_dropout(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or not module.training
            or not getattr(module, "p", 0.0)
        ):
            return
        line = find_call(sys._getframe(1), beyond="forward").line
        if line is not None and not is_recomputed_later():
            self.active_dropout.setdefault(line, type(module).__name__)


def find_trained_models(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the outermost modules of this process that contain any of these parameters."""
    trained = set(map(id, parameters))
    # By their type: a proxy may do work when it is asked for its class.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = set[int]()
    for module in modules:
        inner.update(map(id, module.children()))
    outermost = [module for module in modules if id(module) not in inner]
    return [module for module in outermost if trained.intersection(map(id, module.parameters()))]


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd)


def list_compilations() -> list[Any]:
    """Return what torch noted of each compilation in this process; the compiler is not imported for it."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return []
    return [one for one in utils.get_compilation_metrics() if one.is_forward]


def is_recomputed_later() -> bool:
    """Whether activation checkpointing runs the forward without gradients, to run it again in the backward."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


_aten = torch.ops.aten
_SYNCS = {
    _aten._local_scalar_dense.default: "reads a value of a tensor",
    _aten.nonzero.default: "counts the elements that are not zero",
    _aten.masked_select.default: "selects by a mask, whose size is unknown before",
}
_KERNEL_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
_SOFTMAXES = {_aten._softmax.default, _aten._safe_softmax.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class Event(NamedTuple):
    """An operator of interest.

    Attributes:
        kind: "sync", "list", "copy" between devices, "float64", "log_softmax", or "attention", the softmax of one.
        call: where it was called from.
        phase: the phase of the step.
        seconds: time of the operator itself, on the host.
        detail: half a sentence.
        nbytes: size of its result.
    """

    kind: str
    call: Call
    phase: str
    seconds: float
    detail: str
    nbytes: int


@dataclass
class Alive:
    """A tensor that a step made, or changed in place, as long as it lives."""

    tensor: weakref.ref[Tensor]
    line: SourceLine
    is_new: bool


class OperatorWatch(TorchDispatchMode):
    """Records the operators of one step, and what their kernels compute and move; each runs unchanged.

    Args:
        phase: returns the name of the current phase.
        trial: called with each operator and its arguments before it runs; it may time the same on copies.
        costs: adds up the times of the operators of forward and backward; None to time none.
    """

    def __init__(
        self, phase: Callable[[], str], trial: Callable[..., None], costs: OperatorCosts | None = None
    ) -> None:
        super().__init__()
        self.costs = costs
        self.events: list[Event] = []
        self.kernels = RecordedStep()
        self.failure: Exception | None = None  # to describe a kernel
        self.made: list[Alive] = []
        self._phase, self._trial = phase, trial

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._trial(func, args, kwargs)
        phase, began = self._phase(), perf_counter()
        if self.costs is not None and phase in ("forward", "backward"):
            result = self.costs.run(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        seconds = perf_counter() - began
        self._note_kernel((func, args, kwargs), result, phase)
        described = _describe(func, args, result)
        # The user's line is far up the stack there, and what these phases make is not the user's.
        if described is None and phase in ("backward", "optimizer"):
            return result
        call = find_call(sys._getframe(1))
        if described is not None:
            kind, detail = described
            nbytes = result.nbytes if isinstance(result, Tensor) else 0
            self.events.append(Event(kind, call, phase, seconds, detail, nbytes))
        if call.line is not None:
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    self.made.append(Alive(weakref.ref(tensor), call.line, not func._schema.is_mutable))
        return result

    def _note_kernel(self, call: tuple[Any, Any, Any], result: object, phase: str) -> None:
        if self.failure is not None or phase not in _KERNEL_PHASES:
            return
        try:
            note_call(self.kernels, call, result, _KERNEL_PHASES[phase])
        except Exception as error:  # it is reported at the end: the training must not fail because of it
            self.failure = error

    def find_alive(self) -> dict[SourceLine, list[Tensor]]:
        """Return the tensors of the step that still exist, by the line that made them.

        Of those that were changed in place only the ones with a graph, which has grown.
        """
        found: dict[SourceLine, list[Tensor]] = {}
        for made in self.made:
            tensor = made.tensor()
            if tensor is not None and (made.is_new or tensor.grad_fn is not None):
                found.setdefault(made.line, []).append(tensor)
        return found


def _describe(func: Any, args: Any, result: Any) -> tuple[str, str] | None:
    """Return the kind and a description of an operator of interest; None for all others."""
    if func in _SYNCS:
        return "sync", _SYNCS[func]
    if func in _INDEXING and _has_mask(args[1]):
        return "sync", "indexes with a boolean mask"
    if func is _aten.lift_fresh.default:
        return ("list", f"a tensor of {result.numel()} elements") if result.numel() > 1 else None
    if func is _aten._log_softmax.default:
        return "log_softmax", " × ".join(map(str, result.shape))
    is_square = isinstance(result, Tensor) and result.dim() > 2 and result.shape[-1] == result.shape[-2]
    if func in _SOFTMAXES and is_square and not is_recomputed_later():
        return "attention", " × ".join(map(str, result.shape))
    if func is _aten._to_copy.default and args[0].device != result.device:
        return "copy", f"from {args[0].device} to {result.device}"
    if isinstance(result, Tensor) and result.dtype == torch.float64 and result.numel() > 1:
        return "float64", str(func)
    return None


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
