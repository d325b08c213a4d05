"""Run the model's blocks as compiled code, with one compilation per kind of block."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning as L  # imported before torch.compile is used, since Lightning records its arguments
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.messages import explain, note_once, number_of, say, warn
from lightning_fasttrain.core.modules.blocks import Blocks, disable_cache_, find_blocks
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.recomputation import RecomputedForward
from lightning_fasttrain.core.modules.select import has_parameters, is_inside
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    list_wrapped,
    undo_all,
    why_none_ran,
    wrapper_on,
    wrappers_on,
)
from lightning_fasttrain.model.activation_offload import ActivationOffload
from lightning_fasttrain.model.compile.compiled_forward import (
    WITHOUT_GRAPHS,
    CompiledEntry,
    CompiledForward,
    CompiledLoss,
    DisabledCache,
    has_cuda_graphs,
    key_of_code,
)
from lightning_fasttrain.model.compile.partitioned_forward import Partition, PartitionedForward
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks

_MANY_OUTPUTS = 16_000  # of a head; its loss takes 0.85 times as long compiled, by examples/chunked_loss.py
_MANY_RECOMPILES = 7  # with the first compilation, torch's limit of 8 for one code object
Compiled = CompiledForward | CompiledLoss | DisabledCache
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@check_arguments
def compile_blocks_(
    model: nn.Module,
    mode: str = "default",
    *,
    blocks: Blocks | None = None,
    backend: str | Callable[..., object] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    fallback: bool = True,
    head: bool | None = None,
    check: bool = True,
) -> dict[str, Compiled]:
    """Compile the forward of each repeated block, in place; ``state_dict`` keys and classes are kept.

    Blocks of one class with parameters of the same shapes share one compilation, so that twelve layers compile in the
    time of one. Blocks that differ in a value, such as a rate that grows from layer to layer, are compiled separately.
    Compilation happens at the first call. A block that cannot be compiled runs eagerly, after one warning; each rank
    decides for itself, as blocks do not communicate with other ranks. The key-value cache of Hugging Face's models is
    disabled in their configs, since each layer would be compiled for its own entry of it.

    Compilers have had silent errors in gradients. Therefore, at the first call with gradients, one block of each kind
    runs its forward and backward both eagerly and compiled on its real inputs; if the results differ by more than
    rounding, all blocks of that kind run eagerly, after one warning. Dropout masks, which differ, are compared
    separately: the gradient must belong to the mask of the forward.

    Args:
        model: any module.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``. On a GPU
            ``"reduce-overhead"`` and ``"max-autotune"`` replay the passes of a block as CUDA graphs, for shapes that
            do not change: where micro-batches are so small that the device waits for the host. A loop without the
            Trainer that keeps outputs of blocks calls ``torch.compiler.cudagraph_mark_step_begin()`` before each step.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`. The module around
            the layers may be named instead, such as ``"model"`` of a Llama: its layers are compiled as one, which
            spares Python's work for each call and takes as many times as long to compile.
        backend: as for ``torch.compile``; the modes are inductor's.
        dynamic: as for ``torch.compile``.
        fullgraph: raise at the first graph break.
        fallback: whether a block that fails to compile runs eagerly; False raises the compiler's error.
        head: whether modules beside the blocks are compiled too, one by one: embeddings and final norms, and the
            computation of :class:`~lightning_fasttrain.FusedLossHead` between its matrix products, with inductor. None
            compiles this computation alone, for heads of at least 16,000 outputs, where it was measured to be faster.
        check: whether compiled code is compared with eager code before it is used. It takes a few forwards of one
            block of each kind, and a compilation without dropout if there is some.

    Returns:
        Qualified name of each block or other module → its compiled ``forward``, with a method ``undo`` and the
        ``failure`` that made it fall back, or None. If a model's cache was disabled, the name of that setting too.

    Raises:
        ValueError: unknown mode or backend; no blocks were found.

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
    if backend == "inductor" and has_cuda_graphs(mode):
        # Before the first mark, torch lets a replay overwrite what an earlier one returned, even if it is in use.
        torch.compiler.cudagraph_mark_step_begin()
    entries: dict[tuple[Any, ...], CompiledEntry] = {}
    compiled: dict[str, Compiled] = {}
    found = find_blocks(model, blocks)
    if head:
        found = {**found, **_modules_beside(model, found.values())}
    for name, block in found.items():
        if wrapper_on(block, CompiledForward):
            # A technique and a direct call may both request it.
            compiled[name] = next(wrappers_on(block, CompiledForward))
            continue
        signature = key_of_code(block)
        if signature not in entries:
            entries[signature] = CompiledEntry(block, options, check)
        compiled[name] = CompiledForward(block, name, entries[signature], fallback)
        compiled[name].install()
    if head is not False and backend == "inductor":
        compiled.update(_compile_losses(model, 0 if head else _MANY_OUTPUTS))
    without_cache = disable_cache_(model)
    if without_cache:
        note_once("compile_blocks_: use_cache=False in the model's config, since blocks would be compiled one by one")
    compiled.update((name, DisabledCache(undo)) for name, undo in without_cache.items())
    return compiled


def _compile_losses(model: nn.Module, fewest_outputs: int) -> dict[str, CompiledLoss]:
    """Compile the element-wise part of replaced forwards, such as the loss of a fused head."""
    compiled: dict[str, CompiledLoss] = {}
    for name, module in model.named_modules():
        for wrapper in wrappers_on(module, WrappedForward):
            is_large = getattr(module, "out_features", 0) >= fewest_outputs
            if wrapper.can_compile and not wrapper.compiled and is_large:
                compiled[name] = CompiledLoss(wrapper)
    return compiled


def _modules_beside(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the largest modules with weights that neither are nor contain a block or head: embeddings, final norms.

    A single embedding or linear layer is one kernel, which a compiler cannot improve.
    """
    others = {*blocks, *map(model.get_submodule, find_heads(model))}
    uncalled = (nn.ModuleList, nn.ModuleDict)  # they have no forward
    holders = {m for m in model.modules() if isinstance(m, uncalled) or not others.isdisjoint(m.modules())}
    found = {}
    for prefix, holder in model.named_modules():
        if holder not in holders or holder in others or is_inside(prefix, found):
            continue
        for name, part in holder.named_children():
            one_kernel = isinstance(part, nn.Linear | nn.Embedding)
            if part not in holders and not one_kernel and has_parameters(part):
                found[f"{prefix}.{name}".lstrip(".")] = part
    return found


@dataclass
class CompileReport:
    """Work of the compiler.

    Attributes:
        graphs: number of compiled graphs, including recompilations.
        recompiles: how many of them were for code already compiled once (new shapes, other guards).
        graph_breaks: reason → number of graph breaks.
        seconds: time spent compiling.
        fallbacks: names of blocks that run eagerly → why.
        apart: for each kind of block that was compared with eager code, the largest relative distance.
        others: for how many blocks code was compiled again since they differ in a value, such as a rate that grows
            from block to block; not part of ``recompiles``.
    """

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    fallbacks: dict[str, str] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    others: int = 0

    def __str__(self) -> str:
        text = (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.recompiles} of them recompilations; "
            f"{sum(self.graph_breaks.values())} graph breaks"
        )
        if self.others:
            text += f"; {number_of(self.others, 'block')} compiled separately, since they differ in a value"
        if self.apart:
            kinds = number_of(len(self.apart), "kind")
            text += f"; {kinds} of block compared with eager code, relative difference at most {max(self.apart):.0e}"
        for reason, times in sorted(self.graph_breaks.items(), key=lambda item: -item[1])[:3]:
            text += f"\n  {times}× {reason.strip().splitlines()[0]}"
        for name, why in self.fallbacks.items():
            text += f"\n  block '{name}' runs uncompiled: {why}"
        return text


class CompileWatch:
    """Counts the compiler's work from now on.

    Example:
        >>> watch = CompileWatch()
        >>> watch.report().graphs
        0
    """

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._utils = utils
        self._breaks = Counter(utils.counters["graph_break"])
        self._compiled = len(self._durations())
        # By identity: torch keeps one list per process, and drops the oldest entries when it is full.
        # References are held, since torch drops old entries, whose ids new ones could reuse.
        self._known = list(utils.get_compilation_metrics())

    def _durations(self) -> list[float]:
        return self._utils.compilation_time_metrics.get("_compile.compile_inner", [])

    def report(self) -> CompileReport:
        durations = self._durations()[self._compiled :]
        # The backward graph has a separate entry, and is not a second compilation.
        known = set(map(id, self._known))
        again = 0
        for metrics in self._utils.get_compilation_metrics():
            _, slash, attempt = (metrics.compile_id or "").rpartition("/")  # "frame/attempt"
            if id(metrics) not in known and metrics.is_forward and slash:
                again += attempt != "0"
        breaks = Counter(self._utils.counters["graph_break"]) - self._breaks
        return CompileReport(len(durations), again, dict(breaks), sum(durations))


class CompileBlocks(Technique):
    """Compile the model's blocks; report graph breaks, recompilations and compile time at the end of ``fit``.

    Acts after every other operation on the model, so that their changes are compiled too; undone at teardown. The
    complete ``LightningModule`` is never compiled, since ``self.log`` would fail. Without dropout training is the same
    up to rounding, as the compiler chooses the order of sums. With dropout, inductor draws masks with its own
    generator: from the same distribution, but different ones, as with another seed.
    ``torch._inductor.config.fallback_random = True`` makes it draw those of eager code.

    torch keeps compiled code for later runs in the folder that the environment variable ``TORCHINDUCTOR_CACHE_DIR``
    names; ``torch.compiler.save_cache_artifacts`` packs it for other machines. Loading it executes what is in it.

    Args:
        mode: as for :func:`~lightning_fasttrain.compile_blocks_`.
        blocks: as for :func:`~lightning_fasttrain.compile_blocks_`.
        backend: as for :func:`~lightning_fasttrain.compile_blocks_`.
        dynamic: as for :func:`~lightning_fasttrain.compile_blocks_`.
        fullgraph: as for :func:`~lightning_fasttrain.compile_blocks_`.
        fallback: as for :func:`~lightning_fasttrain.compile_blocks_`.
        head: as for :func:`~lightning_fasttrain.compile_blocks_`.
        check: as for :func:`~lightning_fasttrain.compile_blocks_`.

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
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.COMPILES_BLOCKS})
    surgery: ClassVar[Surgery | None] = Surgery.COMPILE
    effect: ClassVar[str] = "blocks run as fused, compiled code"
    when: ClassVar[str] = "a run is long enough to recover the minutes of compiling; not if shapes change at every step"
    in_a_loop: ClassVar[str] = "compile_blocks_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (
        Setting("compile", "blocks", cost=0.8),
        Setting("compile", "blocks as CUDA graphs", {"mode": "reduce-overhead"}, cost=0.8, device="cuda"),
    )
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "default",
        *,
        blocks: Blocks | None = None,
        backend: str | Callable[..., object] = "inductor",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        fallback: bool = True,
        head: bool | None = None,
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
        self.report = CompileReport()
        self._watch: CompileWatch | None = None
        self._compiled: dict[str, Compiled] = {}

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        way_out = "Use CompileBlocks(mode='max-autotune-no-cudagraphs')"
        kept = "CUDA graphs keep saved tensors in their own memory, so moving them would free nothing"
        moved = "parameters are gathered into other memory in each pass, and every graph would be captured again"
        graphs = lambda compiled, _: compiled.uses_cuda_graphs  # noqa: E731
        return (
            Conflict(ActivationOffload, kept, way_out, graphs),
            Conflict(FSDPStrategy, moved, way_out, graphs),
            Conflict(ModelParallelStrategy, moved, way_out, graphs),
        )

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether compiled code will be replayed as CUDA graphs on this machine."""
        return has_cuda_graphs(self.mode)

    def apply(self, model: nn.Module) -> Undo:
        self._watch = CompileWatch()
        already = list_wrapped(model, CompiledForward)
        self._compiled = compile_blocks_(model, self.mode, **self.options)
        undos: list[Undo] = [self._compiled.clear]
        undos += [forward.undo for name, forward in self._compiled.items() if name not in already]
        return undo_all(undos)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.compiler is False:
            return "torch.compile cannot find a compiler: see `fasttrain doctor`"
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> Technique | None:
        if self.options["backend"] != "inductor":
            step.leave_out(self, f"what backend={self.options['backend']!r} keeps for the backward is unknown")
            return None
        if step.on_cuda and self.mode in WITHOUT_GRAPHS:
            step.notes.append(f"The memory that CUDA graphs keep, by mode={self.mode!r}, is not counted.")
        return _PartitionedBlocks(self.options, step)

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, CompiledForward)
        if not blocks:
            return ""
        heads = [name for name, compiled in self._compiled.items() if isinstance(compiled, CompiledLoss)]
        beside = f", and the loss at {', '.join(heads)}" if heads else ""
        return f"{blocks} compiled{beside}"

    def outcome(self, model: nn.Module) -> str:
        failures = self._failures()
        if not failures:
            return ""
        first = next(iter(failures.values()))
        return f"{len(failures)} of {len(list_wrapped(model, CompiledForward))} blocks ran uncompiled: {first}"

    def _failures(self) -> dict[str, str]:
        return {name: forward.failure for name, forward in self._compiled.items() if forward.failure is not None}

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, CompiledForward)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: mark that the outputs of the previous step may be overwritten by CUDA graphs."""
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: report while the blocks are still compiled."""
        if self._watch is None:
            return
        self.report = self._watch.report()
        self.report.fallbacks = self._failures()
        entries = {forward.entry for forward in self._compiled.values() if isinstance(forward, CompiledForward)}
        self.report.others = sum(entry.others for entry in entries)
        self.report.recompiles = max(0, self.report.recompiles - self.report.others)
        verdicts = [entry.verdict for entry in entries if entry.verdict is not None]
        self.report.apart = [verdict.apart for verdict in verdicts if not verdict.unchecked]
        if self.report.recompiles >= _MANY_RECOMPILES:
            why = "each new batch shape is compiled again, until the compiler's limit is reached"
            way_out = "Pad batches to a few sequence lengths, or use CompileBlocks(dynamic=True)"
            warn(explain(f"CompileBlocks: {self.report.recompiles} recompilations", why, way_out))
        if trainer.is_global_zero:
            say("CompileBlocks: %s", self.report)


class _PartitionedBlocks(Technique):
    """Predicts compiled blocks, by the graphs that the compiler would make of them.

    Args:
        options: of the technique.
        step: the step that is predicted.
    """

    surgery: ClassVar[Surgery | None] = Surgery.COMPILE

    def __init__(self, options: Mapping[str, Any], step: PredictedStep) -> None:
        self.options, self.step = options, step

    def apply(self, model: nn.Module) -> Undo:
        known: dict[tuple[Any, ...], Partition] = {}
        undos: list[Undo] = list(disable_cache_(model).values())
        for index, block in enumerate(find_blocks(model, self.options["blocks"]).values()):
            forward = PartitionedForward(block, index, known, self.step)
            # The compiler sees what is recomputed; here its graphs are what is recomputed.
            recomputed = wrapper_on(block, RecomputedForward)
            undos.append(forward.install_below() if recomputed else forward.install())
        if self.options["head"] is not False:
            fewest = 0 if self.options["head"] else _MANY_OUTPUTS
            undos += [loss.undo for loss in _compile_losses(model, fewest).values()]
        return undo_all(undos)
