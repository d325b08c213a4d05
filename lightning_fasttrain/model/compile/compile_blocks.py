"""Run the model's blocks as compiled code, with one compilation per kind of block."""

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import lightning as L  # imported before torch.compile is used, since Lightning records its arguments
import torch
from torch import nn

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.messages import explain, note_once, say, warn, warn_on_any_rank
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.select import has_parameters
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    first_line,
    why_none_ran,
    wrapper_on,
    wrappers_on,
)
from lightning_fasttrain.model.activation_offload import ActivationOffload
from lightning_fasttrain.model.compile.compile_report import (
    CompileReport,
    CompileWatch,
    load_compile_cache,
    read_verdicts,
    save_compile_cache,
)
from lightning_fasttrain.model.compile.compiled_check import Verdict, check_compiled, key_of
from lightning_fasttrain.model.compile.known_compiler_faults import list_faults
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Setting, Surgery, Technique
from lightning_fasttrain.technique.facts import NO_BLOCKS, Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep

_MANY_RECOMPILES = 7  # with the first compilation, torch's limit of 8 for one code object
_OVERWRITES = "CUDA graphs replay into the same memory, which overwrites gradients that are still being accumulated"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_blocks_(
    model: nn.Module,
    mode: str = "default",
    *,
    blocks: Blocks | None = None,
    backend: str = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    fallback: bool = True,
    head: bool = False,
    check: bool = True,
) -> dict[str, "CompiledForward | CompiledLoss"]:
    """Compile the forward of each repeated block, in place; ``state_dict`` keys and classes are kept.

    Blocks of one class with parameters of the same shapes share one compilation, so that twelve layers compile in the
    time of one; different ones never count as each other's recompilations. Compilation happens at the first call. A
    block that cannot be compiled runs eagerly, after one warning; each rank decides for itself, as blocks do not
    communicate with other ranks.

    Compilers have had silent errors in gradients. Therefore, at the first call with gradients, one block of each kind
    runs its forward and backward both eagerly and compiled on its real inputs; if the results differ by more than
    rounding, all blocks of that kind run eagerly, after one warning. Dropout masks, which differ, are compared
    separately: the gradient must belong to the mask of the forward.

    Args:
        model: any module.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        backend: as for ``torch.compile``; the modes are inductor's.
        dynamic: as for ``torch.compile``.
        fullgraph: raise at the first graph break.
        fallback: whether a block that fails to compile runs eagerly; False raises the compiler's error.
        head: compile modules beside the blocks too, one by one: embeddings and final norms, and the computation of
            :class:`~lightning_fasttrain.FusedLossHead` between its matrix products, with inductor.
        check: whether compiled code is compared with eager code before it is used. It takes a few forwards of one
            block of each kind, and a compilation without dropout if there is some.

    Returns:
        Qualified name of each block or other module → its compiled ``forward``, with a method ``undo`` and the
        ``failure`` that made it fall back, or None.

    Raises:
        ValueError: unknown mode; no blocks were found.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        >>> compiled = compile_blocks_(net, backend="eager")
        >>> list(compiled), list(net.state_dict())[0]
        (['0', '1', '2'], '0.0.weight')

    Source:
        Regional compilation, https://docs.pytorch.org/tutorials/recipes/regional_compilation.html; the forward is
        compiled instead of calling ``module.compile()``, which has no effect on torch.nn's own modules in torch 2.13.
    """
    one_of("mode", mode, MODES)
    options: dict[str, Any] = {"backend": backend, "dynamic": dynamic, "fullgraph": fullgraph}
    if backend == "inductor" and mode != "default":
        options["mode"] = mode
    entries: dict[tuple[Any, ...], CompiledEntry] = {}
    compiled: dict[str, CompiledForward | CompiledLoss] = {}
    found = find_blocks(model, blocks)
    for name, block in {**found, **(_modules_beside(model, found.values()) if head else {})}.items():
        if wrapper_on(block, CompiledForward):
            # A technique and a direct call may both request it.
            compiled[name] = next(wrappers_on(block, CompiledForward))
            continue
        shapes = tuple((key, p.shape, p.dtype) for key, p in block.named_parameters())
        # The compiler distinguishes replaced forwards by identity, so blocks with such layers share no code.
        replaced = [id(part) for part in block.modules() if part is not block and wrapper_on(part, WrappedForward)]
        signature = (type(block), _runs_class_forward(block), shapes, *replaced)
        if signature not in entries:
            entries[signature] = CompiledEntry(block, options, check)
        compiled[name] = CompiledForward(block, name, entries[signature], fallback)
        compiled[name].install()
    if head and backend == "inductor":
        for name, module in model.named_modules():
            for wrapper in wrappers_on(module, WrappedForward):
                if wrapper.can_compile and not wrapper.compiled:
                    compiled[name] = CompiledLoss(wrapper)
    return compiled


def _new_entry(block: nn.Module) -> types.FunctionType:
    """Return the function to compile for this kind of block, with its own code object.

    The compiler stores its results, and its limit of 8, per code object, so the code is copied. A class's own forward
    is compiled directly; an existing wrapper, or a torch module, whose files the compiler skips at the top level, is
    compiled through a function around it.
    """

    def run_block(self: "CompiledForward", *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    forward = type(block).forward
    if _runs_class_forward(block):
        copy = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copy.__kwdefaults__ = forward.__kwdefaults__  # FunctionType does not accept them
        return copy
    return types.FunctionType(run_block.__code__.replace(), run_block.__globals__, run_block.__name__)


def _runs_class_forward(block: nn.Module) -> bool:
    forward = type(block).forward
    own = isinstance(forward, types.FunctionType) and not forward.__module__.startswith("torch.")
    return own and "forward" not in vars(block)


class CompiledEntry:
    """Shared by blocks of one kind: their compiled code, and the result of its comparison with eager code.

    Attributes:
        verdict: None until a comparison was made.
        is_judged: whether no further comparison is needed. Masks are compared with an input's gradient, which the
            first block after a frozen embedding lacks: then the next block is compared as well.
    """

    def __init__(self, block: nn.Module, options: dict[str, Any], check: bool) -> None:
        self.options = _around_known_faults(block, options)
        self.run: Callable[..., Any] = torch.compile(_new_entry(block), **self.options)
        self._code = _new_entry(block)  # before the block's forward is replaced
        self.is_judged = not check
        self.verdict = None if check else Verdict(unchecked="check=False")
        self.key = ""  # key of the verdict in the cache
        self.known: Mapping[str, Any] = {}  # key → cached verdict

    def judge(self, block: "CompiledForward", args: Any, kwargs: Any) -> Verdict:
        """Compare once, or use the verdict of an earlier process on the same code."""
        self.key = key_of(block.module, self.options)
        known = self.known.get(self.key)
        self.verdict = self._compare(block, args, kwargs) if known is None else Verdict(**known)
        self.is_judged = not self.verdict.without_masks
        if self.verdict.unchecked:
            why = self.verdict.unchecked
            note_once(f"CompileBlocks: '{block.name}' was not compared with the eager block: {why}")
        return self.verdict

    def _compare(self, block: "CompiledForward", args: Any, kwargs: Any) -> Verdict:
        def compile_again() -> Callable[..., Any]:
            return functools.partial(torch.compile(self._code, **self.options), block.target)

        compiled = functools.partial(self.run, block.target)
        return check_compiled(block.module, block.inner, compiled, compile_again, args, kwargs)


def _around_known_faults(block: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    faults = [fault for fault in list_faults(block) if fault.options and options["backend"] == "inductor"]
    if not faults:
        return options
    told = ", ".join(f"{fault.what} (torch issue {fault.issue})" for fault in faults)
    note_once(f"CompileBlocks: {type(block).__name__} is compiled with {faults[0].options} to avoid wrong {told}")
    options = dict(options)
    settings = torch._inductor.list_mode_options(options.pop("mode", "default"))
    for fault in faults:
        settings |= fault.options
    return {**options, "options": settings}  # torch.compile takes a mode or options


class CompiledForward(WrappedForward):
    """A compiled forward that can fall back to the previous one."""

    is_compiled: ClassVar[bool] = True

    def __init__(self, module: nn.Module, name: str, entry: CompiledEntry, fallback: bool) -> None:
        super().__init__(module)
        self.name = name
        # The ``self`` of the entry: a class's own forward needs the module, the function around others this object.
        self.target: Any = module if _runs_class_forward(module) else self
        self.entry = entry
        self.fallback = fallback
        self.is_compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None or torch.compiler.is_compiling():  # a block inside a compiled one is traced with it
            return self.inner(*args, **kwargs)
        self.ran = True
        try:
            if not (self.entry.is_judged or self.is_compared) and torch.is_grad_enabled():
                self._judge(args, kwargs)
            if self._is_trusted():
                return self.entry.run(self.target, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # not a block's own errors
            if not self.fallback:
                raise
            self.failure = first_line(error)
            what = f"block '{self.name}' ({type(self.module).__name__}) could not be compiled and runs eagerly"
            way_out = "Fix the cause, exclude this block with blocks=, or use fallback=False to see the complete error"
            warn_on_any_rank(explain(what, self.failure, way_out))  # the compiler may fail on one rank only
        return self.inner(*args, **kwargs)

    def _judge(self, args: Any, kwargs: Any) -> None:
        self.is_compared = True
        verdict = self.entry.judge(self, args, kwargs)
        if not verdict.failure:
            return
        what = f"block '{self.name}' ({type(self.module).__name__}) gives different results when compiled"
        faults = [fault for fault in list_faults(self.module) if fault.with_dropout is verdict.of_masks]
        known = [f"torch {torch.__version__} has a known error in {f.what} (issue {f.issue})" for f in faults]
        why = "; ".join([verdict.failure, *known])
        way_out = "All blocks of its kind run eagerly. Try another version of torch, or another backend="
        warn_on_any_rank(explain(what, why, way_out))

    def _is_trusted(self) -> bool:
        failure = self.entry.verdict.failure if self.entry.verdict is not None else ""
        if failure:
            self.failure = failure
        return not failure


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


def _modules_beside(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the largest modules with weights that neither are nor contain a block or head: embeddings, final norms.

    A single embedding or linear layer is one kernel, which a compiler cannot improve.
    """
    others = {*blocks, *(model.get_submodule(name) for name in find_heads(model))}
    uncalled = (nn.ModuleList, nn.ModuleDict)  # they have no forward
    holders = {m for m in model.modules() if isinstance(m, uncalled) or not others.isdisjoint(m.modules())}
    found = {}
    for prefix, holder in model.named_modules():
        if holder not in holders or holder in others or any(prefix.startswith(f"{name}.") for name in found):
            continue
        for name, part in holder.named_children():
            one_kernel = isinstance(part, nn.Linear | nn.Embedding)
            if part not in holders and not one_kernel and has_parameters(part):
                found[f"{prefix}.{name}" if prefix else name] = part
    return found


class CompileBlocks(Technique):
    """Compile the model's blocks; report graph breaks, recompilations and compile time at the end of ``fit``.

    Acts after every other operation on the model, so that their changes are compiled too; undone at teardown. The
    complete ``LightningModule`` is never compiled, since ``self.log`` would fail. Without dropout training is the same
    up to rounding, as the compiler chooses the order of sums. With dropout, inductor draws masks with its own
    generator: from the same distribution, but different ones, as with another seed.
    ``torch._inductor.config.fallback_random = True`` makes it draw those of eager code.

    Args:
        mode: as for :func:`~lightning_fasttrain.compile_blocks_`; modes with CUDA graphs do not support gradient
            accumulation.
        blocks: as for :func:`~lightning_fasttrain.compile_blocks_`.
        backend: as for :func:`~lightning_fasttrain.compile_blocks_`.
        dynamic: as for :func:`~lightning_fasttrain.compile_blocks_`.
        fullgraph: as for :func:`~lightning_fasttrain.compile_blocks_`.
        fallback: as for :func:`~lightning_fasttrain.compile_blocks_`.
        cache: a file from which compiled code is loaded, if it exists, and to which it is saved at the end of ``fit``.
        head: as for :func:`~lightning_fasttrain.compile_blocks_`.
        check: as for :func:`~lightning_fasttrain.compile_blocks_`. Its results are saved in the ``cache`` too.

    Attributes:
        report: a :class:`CompileReport`, after ``fit``.

    Example:
        >>> compiled = CompileBlocks(mode="max-autotune-no-cudagraphs")

    Source:
        See :func:`~lightning_fasttrain.compile_blocks_`.
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 1e-4
    keeps_draws: ClassVar[bool] = False
    surgery: ClassVar[Surgery | None] = Surgery.COMPILE
    effect: ClassVar[str] = "blocks run as fused, compiled code"
    when: ClassVar[str] = "a run is long enough to recover the minutes of compiling; not if shapes change at every step"
    in_a_loop: ClassVar[str] = "compile_blocks_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("compile", "blocks", cost=0.8),)
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "default",
        *,
        blocks: Blocks | None = None,
        backend: str = "inductor",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        fallback: bool = True,
        cache: str | os.PathLike[str] | None = None,
        head: bool = False,
        check: bool = True,
    ) -> None:
        self.mode = one_of("mode", mode, MODES)
        self.options: dict[str, Any] = {
            "blocks": blocks,
            "backend": backend,
            "dynamic": dynamic,
            "fullgraph": fullgraph,
            "fallback": fallback,
            "head": head,
            "check": check,
        }
        self.cache = cache
        self.report = CompileReport()
        self._watch: CompileWatch | None = None
        self._compiled: dict[str, CompiledForward | CompiledLoss] = {}

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        way_out = "Use CompileBlocks(mode='max-autotune-no-cudagraphs')"
        kept = "CUDA graphs keep saved tensors in their own memory, so moving them would free nothing"
        graphs = lambda compiled, _: compiled.uses_cuda_graphs  # noqa: E731
        return (
            Conflict(Capability.SPLITS_BATCHES, _OVERWRITES, f"{way_out}, or one micro-batch", graphs),
            Conflict(Capability.SUMS_BATCHES, _OVERWRITES, way_out, graphs),
            Conflict(ActivationOffload, kept, way_out, graphs),
        )

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether compiled code will be replayed as CUDA graphs on this machine."""
        return self.mode in ("reduce-overhead", "max-autotune") and torch.cuda.is_available()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if self.uses_cuda_graphs and trainer.accumulate_grad_batches > 1:
            what = f"CompileBlocks(mode={self.mode!r}) with accumulate_grad_batches={trainer.accumulate_grad_batches}"
            raise ValueError(explain(what, _OVERWRITES, "Use mode='max-autotune-no-cudagraphs'"))
        return None

    def apply(self, model: nn.Module) -> Undo:
        if self.cache is not None:
            load_compile_cache(self.cache)  # before the first call, which compiles
        self._watch = CompileWatch()
        already = {name for name, block in model.named_modules() if wrapper_on(block, CompiledForward)}
        self._compiled = compile_blocks_(model, self.mode, **self.options)
        mine = [forward for name, forward in self._compiled.items() if name not in already]
        if self.cache is not None:
            known = read_verdicts(self.cache)
            for entry in self._entries():
                entry.known = known

        def undo() -> None:
            for forward in mine:
                forward.undo()
            self._compiled = {}

        return undo

    def _entries(self) -> set[CompiledEntry]:
        return {forward.entry for forward in self._compiled.values() if isinstance(forward, CompiledForward)}

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.compiler is False:
            return "torch.compile cannot find a compiler: see `fasttrain doctor`"
        if facts.blocks == 0:
            return NO_BLOCKS
        return None

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "compiled code fuses operations, so this is an upper bound")

    def took_hold(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, CompiledForward)
        return f"{blocks} compiled" if blocks else ""

    def outcome(self, model: nn.Module) -> str:
        failures = [forward.failure for forward in self._compiled.values() if forward.failure is not None]
        if not failures:
            return ""
        return f"{len(failures)} of {len(self._compiled)} blocks ran uncompiled: {failures[0]}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, CompiledForward)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: mark that the outputs of the previous step may be overwritten by CUDA graphs."""
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: report, and save the cache, while the blocks are still compiled."""
        if self._watch is None:
            return
        self.report = self._watch.report()
        self.report.fallbacks = {name: f.failure for name, f in self._compiled.items() if f.failure is not None}
        verdicts = {entry.key: entry.verdict for entry in self._entries() if entry.key and entry.verdict is not None}
        self.report.apart = [verdict.apart for verdict in verdicts.values() if not verdict.unchecked]
        if self.report.recompiles >= _MANY_RECOMPILES:
            why = "each new batch shape is compiled again, until the compiler's limit is reached"
            way_out = "Pad batches to a few sequence lengths, or use CompileBlocks(dynamic=True)"
            warn(explain(f"CompileBlocks: {self.report.recompiles} recompilations", why, way_out))
        if trainer.is_global_zero:
            say("CompileBlocks: %s", self.report)
            kept = {key: asdict(verdict) for key, verdict in verdicts.items() if not verdict.unchecked}
            if self.cache is not None and not save_compile_cache(self.cache, kept):
                note_once("CompileBlocks: the compiler produced nothing to save in the cache")
