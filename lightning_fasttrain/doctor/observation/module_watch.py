"""Note the modules that a step calls, their mode, the size of their batches, and what was compiled."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_fasttrain.doctor.observation.source_lines import SourceLine, find_call


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
