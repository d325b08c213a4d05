"""The compiled forward of a block, which is able to fall back to eager code."""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lightning_fasttrain.core.messages import describe_error, explain, note_once, warn_on_any_rank
from lightning_fasttrain.core.modules.parameters import device_of
from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    has_dropout,
    undo_all,
    wrappers_on,
)
from lightning_fasttrain.model.compile.compiled_check import Verdict, check_compiled

_MOST_OTHERS = 3  # with the first, half of torch's limit of 8 results: the rest is for other shapes and for evaluation
# Modes of torch.compile that replay CUDA graphs → the same without.
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


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
    CompilerFault(193061, "gradients of a modulation that several norms share", "2.10", "2.16"),
    CompilerFault(190758, "dropout in the backward under activation_memory_budget", "2.4", "2.16", with_dropout=True),
    # Groups of four entries share one draw, which is consistent with the gradient but still wrong. torch 2.15 has
    # switched it off.
    CompilerFault(198333, "masks of dropout", "2.13", "2.15", "cuda", True, {"fallback_random": True}),
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

    def run_block(self: WrappedForward, *args: object, **kwargs: object) -> Any:
        return self.inner(*args, **kwargs)

    forward = type(block).forward
    if runs_class_forward(block):
        return _copy_code(forward)
    return _copy_code(run_block)


def _copy_code(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    # FunctionType does not accept them.
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def runs_class_forward(block: nn.Module) -> bool:
    forward = type(block).forward
    own = isinstance(forward, types.FunctionType) and not forward.__module__.startswith("torch.")
    return own and "forward" not in vars(block)


def has_cuda_graphs(mode: str) -> bool:
    """Whether code compiled in this mode is replayed as CUDA graphs on this machine."""
    return mode in WITHOUT_GRAPHS and torch.cuda.is_available()


def key_of_code(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks which can share one compilation."""
    shapes = tuple((key, p.shape, p.dtype) for key, p in block.named_parameters())
    replaced = [
        (name, type(wrapper)) for name, part in block.named_modules() for wrapper in wrappers_on(part, WrappedForward)
    ]
    return type(block), runs_class_forward(block), shapes, *replaced


@dataclass
class CompiledCode:
    """One code object, of which the compiler keeps at most eight results.

    Attributes:
        run: the compiled function.
        others: number of blocks for which it was compiled again, since they differ in a value, such as a rate.
    """

    run: Callable[..., Any]
    others: int = 0
    ran: bool = False

    def run_first(self, *args: object, **kwargs: object) -> Any:
        """Run a block that has not run in this code before."""
        from torch._dynamo import utils  # takes long to import

        graphs = utils.counters["stats"]["unique_graphs"]
        output = self.run(*args, **kwargs)
        if self.ran and utils.counters["stats"]["unique_graphs"] > graphs:
            self.others += 1
        self.ran = True
        return output


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
        mode = options.get("mode", "default")
        self.has_graphs = has_cuda_graphs(mode)
        self._options = {True: _add_settings(block, options)}
        if self.has_graphs:
            options = {**options, "mode": WITHOUT_GRAPHS[mode]}
        self.options = self._options[False] = _add_settings(block, options)
        self._function = _new_entry(block)  # before the block's forward is replaced
        self._codes = {with_gradients: [self._compile(with_gradients)] for with_gradients in (True, False)}
        self.is_judged = not check
        self.verdict = None if check else Verdict(unchecked="check=False")

    @property
    def others(self) -> int:
        """For how many blocks code was compiled again, since they differ in a value."""
        return sum(code.others for codes in self._codes.values() for code in codes)

    def code_for_another_block(self, with_gradients: bool) -> CompiledCode:
        """Return the code for a block that has not run yet: new code, once too many blocks have differed."""
        codes = self._codes[with_gradients]
        if codes[-1].others >= _MOST_OTHERS:
            codes.append(self._compile(with_gradients))
        return codes[-1]

    def _compile(self, with_gradients: bool) -> CompiledCode:
        function = _copy_code(self._function)
        run = torch.compile(function, **self._options[with_gradients])
        weakref.finalize(run, _free_results, function.__code__).atexit = False
        return CompiledCode(run)

    def judge(
        self, block: WrappedForward, target: object, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Verdict:
        """Compare the compiled code with the block's eager code.

        Args:
            block: wrapper of the block, whose ``inner`` is the eager code.
            target: first argument of the compiled code.
            args: of the call.
            kwargs: of the call.
        """
        compiled = functools.partial(self._codes[not self.has_graphs][0].run_first, target)
        again = lambda: functools.partial(self._compile(False).run, target)  # noqa: E731
        self.verdict = check_compiled(block.module, block.inner, compiled, again, args, kwargs)
        self.is_judged = not self.verdict.without_masks
        return self.verdict


def _free_results(code: types.CodeType) -> None:
    """Free what the compiler keeps for a code object.

    It refers to the code object, and the garbage collector cannot see that it belongs to it (torch issue 107469). So it
    would stay after the run, and with CUDA graphs their memory on the device too.
    """
    from torch._dynamo.eval_frame import remove_from_cache  # takes long to import

    remove_from_cache(code)


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
        listed = ", ".join(f"{fault.what} (torch issue {fault.issue})" for fault in faults)
        note_once(f"CompileBlocks: {type(block).__name__} is compiled with {faults[0].options} to avoid wrong {listed}")
    return {**options, "options": settings}


_KINDS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

_LIBRARY = torch.library.Library("lightning_fasttrain", "FRAGMENT")
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class RecomputeWithoutRandomState(CustomGraphPass):
    """A pass over the joint graph of forward and backward: attention that draws nothing is not marked as random.

    PyTorch marks attention as random whatever its dropout is. A random operation that is recomputed in the backward
    runs inside a Python function that saves the generator's state, or restores it, which took a quarter of the host's
    time of a step of a small GPT. Each one without dropout is replaced by an operation of the same schema that calls
    it and is not marked.
    """

    def __init__(self) -> None:
        self.unmarked = _define_unmarked()  # code that is loaded from the compiler's cache calls them without this pass

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.meta.get("recompute") in _RECOMPUTED and node.target in self.unmarked and draws_nothing(node):
                node.target = self.unmarked[node.target]

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def draws_nothing(node: fx.Node) -> bool:
    """Whether the node, a kind of attention, has a dropout of exactly zero."""
    operation: Any = node.target
    arguments = operation._schema.arguments
    at = next(i for i, argument in enumerate(arguments) if argument.name == "dropout_p")
    dropout: Any = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", arguments[at].default_value)
    return dropout == 0.0


@functools.cache
def _define_unmarked() -> dict[Any, torch._ops.OpOverload]:
    """Return each kind of attention → an operation of the same schema that calls it, once defined for the process."""
    found = {}
    for kind in _KINDS:
        marked = getattr(torch.ops.aten, kind).default
        name = kind.lstrip("_")
        _LIBRARY.define(str(marked._schema).replace(f"aten::{kind}", name, 1), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, marked, "CompositeExplicitAutograd")  # also called with fake tensors, for shapes
        found[marked] = getattr(torch.ops.lightning_fasttrain, name).default
    return found


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
