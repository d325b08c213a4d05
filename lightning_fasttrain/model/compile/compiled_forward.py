"""The compiled forward of a block: compared with eager code, guarded against known faults, able to fall back."""

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import explain, note_once, warn_on_any_rank
from lightning_fasttrain.core.modules.first_derivatives import refuse_second_derivative
from lightning_fasttrain.core.modules.parameters import device_of
from lightning_fasttrain.core.modules.without_dropout import has_dropout
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, first_line, undo_all
from lightning_fasttrain.model.compile.compiled_check import Verdict, check_compiled, key_of
from lightning_fasttrain.model.compile.recomputed_attention import RecomputeWithoutRandomState


@dataclass(frozen=True)
class CompilerFault:
    """One fault, and the conditions under which it occurs.

    Attributes:
        issue: its number among the issues of pytorch/pytorch.
        what: half a sentence.
        since: the first version that has it.
        until: the first version that was not tried, or no longer has it.
        device: the only device that has it; "" for all.
        with_dropout: whether it needs dropout.
        options: inductor options that avoid it; given only if a comparison with the eager block cannot find it.
    """

    issue: int
    what: str
    since: str
    until: str
    device: str = ""
    with_dropout: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


FAULTS = (
    CompilerFault(193061, "gradients of a modulation that several norms share", "2.10", "2.14"),
    CompilerFault(190758, "dropout in the backward under activation_memory_budget", "2.4", "2.14", with_dropout=True),
    # Groups of four entries share one draw, which is consistent with the gradient but still wrong.
    CompilerFault(198333, "masks of dropout", "2.13", "2.14", "cuda", True, {"fallback_random": True}),
)


def list_faults(block: nn.Module, version: str = torch.__version__) -> list[CompilerFault]:
    """List the known faults that a block may trigger when it is compiled.

    Example:
        >>> [fault.issue for fault in list_faults(nn.Linear(2, 2), version="2.12.1")]
        [193061]
    """
    device = device_of(block).type
    drops = has_dropout(block)
    found: list[CompilerFault] = []
    for fault in FAULTS:
        has_it = TorchVersion(fault.since) <= TorchVersion(version) < TorchVersion(fault.until)
        if has_it and fault.device in ("", device) and (drops or not fault.with_dropout):
            found.append(fault)
    return found


def _new_entry(block: nn.Module) -> types.FunctionType:
    """Return the function to compile for this kind of block, with its own code object.

    The compiler stores its results, and its limit of 8, per code object, so the code is copied. A class's own forward
    is compiled directly; an existing wrapper, or a torch module, whose files the compiler skips at the top level, is
    compiled through a function around it.
    """

    def run_block(self: "CompiledForward", *args: object, **kwargs: object) -> Any:
        return self.inner(*args, **kwargs)

    forward = type(block).forward
    if runs_class_forward(block):
        copy = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        # FunctionType does not accept them.
        copy.__kwdefaults__ = forward.__kwdefaults__
        return copy
    return types.FunctionType(run_block.__code__.replace(), run_block.__globals__, run_block.__name__)


def runs_class_forward(block: nn.Module) -> bool:
    forward = type(block).forward
    own = isinstance(forward, types.FunctionType) and not forward.__module__.startswith("torch.")
    return own and "forward" not in vars(block)


_FIRST_DERIVATIVES_ONLY = ("inductor", "aot_eager")
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def has_cuda_graphs(mode: str) -> bool:
    """Whether code compiled in this mode is replayed as CUDA graphs on this machine."""
    return mode in _WITHOUT_GRAPHS and torch.cuda.is_available()


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


class CompiledEntry:
    """Shared by blocks of one kind: their compiled code, and the result of its comparison with eager code.

    Passes without gradients, and the comparison, run without CUDA graphs: their memory may be written again as soon as
    another block begins such a pass.

    Attributes:
        has_graphs: whether passes with gradients are replayed as CUDA graphs.
        verdict: None until a comparison was made.
        is_judged: whether no further comparison is needed. Masks are compared with an input's gradient, which the
            first block after a frozen embedding lacks: then the next block is compared as well.
    """

    def __init__(self, block: nn.Module, options: dict[str, Any], check: bool) -> None:
        _refuse_unknown(options["backend"])
        self.options = _add_settings(block, options)
        self.has_graphs = has_cuda_graphs(options.get("mode", "default"))
        self._with_graphs: Callable[..., Any] = torch.compile(_new_entry(block), **self.options)
        self._without_graphs = self._with_graphs
        if self.has_graphs:
            self.options = _add_settings(block, {**options, "mode": _WITHOUT_GRAPHS[options["mode"]]})
            self._without_graphs = torch.compile(_new_entry(block), **self.options)
        self._code = _new_entry(block)  # before the block's forward is replaced
        self.is_judged = not check
        self.verdict = None if check else Verdict(unchecked="check=False")
        self.key = ""  # key of the verdict in the cache
        self.known: Mapping[str, Any] = {}  # key → cached verdict

    def run(self, *args: object, **kwargs: object) -> Any:
        if torch.is_grad_enabled():
            return self._with_graphs(*args, **kwargs)
        return self._without_graphs(*args, **kwargs)

    def judge(self, block: "CompiledForward", args: tuple[object, ...], kwargs: Mapping[str, object]) -> Verdict:
        """Compare once, or use the verdict of an earlier process on the same code."""
        self.key = key_of(block.module, self.options)
        known = self.known.get(self.key)
        self.verdict = self._compare(block, args, kwargs) if known is None else Verdict(**known)
        self.is_judged = not self.verdict.without_masks
        if self.verdict.unchecked:
            why = self.verdict.unchecked
            note_once(f"CompileBlocks: '{block.name}' was not compared with the eager block: {why}")
        return self.verdict

    def _compare(self, block: "CompiledForward", args: tuple[object, ...], kwargs: Mapping[str, object]) -> Verdict:
        def compile_again() -> Callable[..., Any]:
            return functools.partial(torch.compile(self._code, **self.options), block.target)

        compiled = functools.partial(self._without_graphs, block.target)
        return check_compiled(block.module, block.inner, compiled, compile_again, args, kwargs)


def _refuse_unknown(backend: object) -> None:
    # Those for debugging, such as "eager", are known too, and not listed.
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(map(repr, torch.compiler.list_backends()))
        raise ValueError(explain(f"{backend=}", "torch.compile has no back end of this name", f"Use one of {known}"))


def _add_settings(block: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with inductor's settings for the mode, against known faults, and for recomputed attention."""
    if options["backend"] != "inductor":
        return options
    # torch.compile takes either a mode or options.
    options = dict(options)
    settings = torch._inductor.list_mode_options(options.pop("mode", "default"))
    if torch._inductor.config.joint_custom_pre_pass is None:  # one of the user's own stays in force
        settings["joint_custom_pre_pass"] = RecomputeWithoutRandomState()
    faults = [fault for fault in list_faults(block) if fault.options]
    for fault in faults:
        settings |= fault.options
    if faults:
        told = ", ".join(f"{fault.what} (torch issue {fault.issue})" for fault in faults)
        note_once(f"CompileBlocks: {type(block).__name__} is compiled with {faults[0].options} to avoid wrong {told}")
    return {**options, "options": settings}


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
        first, self.ran = not self.ran, True
        try:
            if not (self.entry.is_judged or self.is_compared) and torch.is_grad_enabled():
                self._judge(args, kwargs)
            if self._is_trusted():
                output = self.entry.run(self.target, *args, **kwargs)
                if first and self.entry.options["backend"] in _FIRST_DERIVATIVES_ONLY:
                    _watch_for_second_derivatives(output)
                return output
        except torch._dynamo.exc.TorchDynamoException as error:  # not a block's own errors
            if not self.fallback:
                raise
            self.failure = first_line(error)
            what = f"block '{self.name}' ({type(self.module).__name__}) could not be compiled and runs eagerly"
            way_out = "Fix the cause, exclude this block with blocks=, or use fallback=False to see the complete error"
            # The compiler may fail on one rank only.
            warn_on_any_rank(explain(what, self.failure, way_out))
        return self.inner(*args, **kwargs)

    def _judge(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.is_compared = True
        verdict = self.entry.judge(self, args, kwargs)
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
