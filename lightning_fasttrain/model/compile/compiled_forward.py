"""The compiled forward of a block, which is able to fall back to eager code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import describe_error, explain, note_once, warn_on_any_rank
from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, undo_all, wrappers_on
from lightning_fasttrain.model.compile.compiled_code import CompiledCode, CompiledEntry, list_faults, runs_class_forward

_FIRST_DERIVATIVES_ONLY = ("inductor", "aot_eager")


def copy_graph_gradients(block: nn.Module) -> Undo:
    """Copy the first gradient of each of the block's parameters out of the memory of the CUDA graph that computed it.

    Autograd stores a parameter's first gradient without a copy and adds later ones to it. The next replay of the graph
    writes into the same memory, so gradients that are accumulated over several passes need memory of their own.
    """
    undos: list[Undo] = []
    for parameter in block.parameters():
        if not parameter.is_floating_point():  # quantised
            continue
        required = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one takes no hook, and may be unfrozen later
        undos.append(parameter.register_post_accumulate_grad_hook(_CopyNewGradient()).remove)
        parameter.requires_grad_(required)
    return undo_all(undos)


class _CopyNewGradient:
    def __init__(self) -> None:
        self.address = 0  # of the last copy

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.data_ptr() == self.address:
            return
        parameter.grad = gradient.clone()
        self.address = parameter.grad.data_ptr()


class CompiledForward(WrappedForward):
    """A compiled forward that can fall back to the previous one."""

    is_compiled: ClassVar[bool] = True

    def __init__(self, module: nn.Module, name: str, entry: CompiledEntry, fallback: bool) -> None:
        super().__init__(module)
        self.name = name
        # The ``self`` of the entry: a class's own forward needs the module, the function around others this object.
        self.target: Any = self
        if runs_class_forward(module):
            self.target = module
        self.entry = entry
        self.fallback = fallback
        self.is_compared = False
        self.is_replayed = entry.has_graphs
        self._codes: dict[bool, CompiledCode] = {}  # with gradients, and without
        self._meters: list[WrappedForward] | None = None  # wrappers beneath that measure in some steps
        self._leave_gradients: Undo = undo_all(())

    def install(self) -> Undo:
        if self.entry.has_graphs:
            self._leave_gradients = copy_graph_gradients(self.module)
        return super().install()

    def undo(self) -> None:
        self._leave_gradients()
        super().undo()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        # A block inside a compiled one is traced with it.
        if self.failure is not None or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        self.ran = True
        if self._is_measured():
            return self.inner(*args, **kwargs)
        first = not self._codes
        try:
            if not (self.entry.is_judged or self.is_compared) and torch.is_grad_enabled():
                self._judge(args, kwargs)
            if self._is_trusted():
                output = self._run_compiled(args, kwargs)
                if first and self.entry.options["backend"] in _FIRST_DERIVATIVES_ONLY:
                    _watch_for_second_derivatives(output)
                return output
        except torch._dynamo.exc.TorchDynamoException as error:  # not a block's own errors
            if not self.fallback:
                raise
            self.failure = describe_error(error)
            what = f"block '{self.name}' ({type(self.module).__name__}) could not be compiled and runs eagerly"
            way_out = "Fix the cause, exclude this block with blocks=, or use fallback=False to see the complete error"
            # The compiler may fail on one rank only.
            warn_on_any_rank(explain(what, self.failure, way_out))
        return self.inner(*args, **kwargs)

    def _is_measured(self) -> bool:
        """Whether a wrapper beneath measures, for which this module must run as it is: compiled, it would break."""
        if self._meters is None:
            beneath = [wrapper for part in self.module.modules() for wrapper in wrappers_on(part, WrappedForward)]
            self._meters = [wrapper for wrapper in beneath if wrapper.measures]
        return any(meter.is_measuring for meter in self._meters)

    def _run_compiled(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        with_gradients = torch.is_grad_enabled()
        code = self._codes.get(with_gradients)
        if code is not None:
            return code.run(self.target, *args, **kwargs)
        code = self._codes[with_gradients] = self.entry.code_for_another_block(with_gradients)
        return code.run_first(self.target, *args, **kwargs)

    def _judge(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.is_compared = True
        verdict = self.entry.judge(self, self.target, args, kwargs)
        if verdict.unchecked:
            note_once(f"CompileBlocks: '{self.name}' was not compared with the eager block: {verdict.unchecked}")
        if not verdict.failure:
            return
        what = f"block '{self.name}' ({type(self.module).__name__}) gives different results when compiled"
        why = verdict.failure
        for fault in list_faults(self.module):
            if fault.with_dropout is verdict.of_masks:
                why += f"; torch {torch.__version__} has a known error in {fault.what} (issue {fault.issue})"
        way_out = "All blocks of its kind run eagerly. Try another version of torch, or another backend="
        warn_on_any_rank(explain(what, why, way_out))

    def _is_trusted(self) -> bool:
        verdict = self.entry.verdict
        if verdict is None or not verdict.failure:
            return True
        self.failure = verdict.failure
        return False


def _watch_for_second_derivatives(output: object) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(_refuse_second_derivative)


def _refuse_second_derivative(gradient: Tensor) -> None:
    refuse_second_derivative("a block of CompileBlocks", 'Use CompileBlocks(backend="eager"), or leave it out')


class CompiledLoss:
    """A loss that compiles its own computation, until ``undo``."""

    def __init__(self, wrapper: WrappedForward) -> None:
        self.wrapper = wrapper
        wrapper.compiled = True

    @property
    def failure(self) -> str | None:
        return self.wrapper.failure

    def undo(self) -> None:
        self.wrapper.compiled = False


@dataclass(frozen=True)
class DisabledCache:
    """The key-value cache of a model, which is disabled until ``undo``."""

    undo: Undo
    failure: None = None
