"""Predict the memory that a training step will need, and count its FLOPs, without allocating anything."""

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import batch_of
from lightning_fasttrain.core.checks import Batch, NonNegativeInt, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.device import traced_as
from lightning_fasttrain.core.host.host_answers import one_document_a_row
from lightning_fasttrain.core.host.lightning import attached_trainer, configured_optimizers, give_optimizers
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import names_of_parameters, parameters_of
from lightning_fasttrain.memory.allocation_trace import AllocationTrace, Recorder
from lightning_fasttrain.memory.caching_allocator import MIN_BLOCK_BYTES, place_in_blocks
from lightning_fasttrain.memory.cuda_kernels import CUBLAS_WORKSPACE, CUDA_WORKSPACE, AsOnCuda, step_in_lists_
from lightning_fasttrain.memory.fake_operators import AssumedArrays, AssumedNumbers
from lightning_fasttrain.memory.fake_step import (
    Factory,
    fake_batch,
    fake_model,
    fake_module,
    find_longest_axis,
    leave_states,
    lend_optimizers,
    settle_,
    step_as_trainer,
    step_by_itself,
)
from lightning_fasttrain.memory.kernel_flops import FlopCounter
from lightning_fasttrain.memory.kernel_workspace import CPU_WORKSPACE, KEPT, quantized_workspace
from lightning_fasttrain.memory.memory_report import MemoryReport, join_range, peak_of, report
from lightning_fasttrain.memory.one_rank import OneRank
from lightning_fasttrain.micro_batching.accumulate_gradients import loss_of
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.optim.named.optimizer_state import early_state, make_twin, tensors_in
from lightning_fasttrain.technique import Technique, check_together
from lightning_fasttrain.technique.declarations import PredictedStep

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    # Autocast is enabled for one kind of device, and fake tensors are on the CPU.
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
}
# float16 takes as much memory as bfloat16, in which more kernels run on a CPU.
_AS_LARGE = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}
PREDICTED_PRECISIONS = (*PRECISIONS, *_AS_LARGE)
DEVICES = ("cpu", "cuda")
_ASSUMED = "The code reads values from tensors (.item(), masks, NumPy), which were assumed."
_RANGE = "They decide shapes: masks select nothing for the lower bound, and everything for the upper bound."
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)

Loss = Callable[[Any, Any], Any]


@check_arguments
def predict_memory(
    module: nn.Module | Factory,
    batch: Batch,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    techniques: Sequence[Technique] = (),
    precision: str = "32-true",
    device: str = "cuda",
    strategy: object = None,
    world: PositiveInt = 1,
    rank: NonNegativeInt = 0,
) -> MemoryReport:
    """Predict the peak memory of one training step, by category, without allocating the model.

    Two steps are run on tensors with shapes and lifetimes but without memory, in the Trainer's order: forward,
    ``zero_grad``, backward, optimizer step. The second is the steady state, in which the optimizer has its state and
    the previous step's gradients still exist during the forward. A model far larger than this machine's memory can
    therefore be predicted, in seconds.

    All tensors are counted, including the batch, as :class:`~lightning_fasttrain.profiling.PeakMemory` would measure
    them. Included are workspaces of convolutions, BatchNorm and LSTMs on the CPU; and on CUDA two cuBLAS workspaces,
    those of sums over rows, attention, embeddings and, where cuDNN is switched off, convolutions, and the blocks of the
    caching allocator, whose fragmentation is in ``reserved_bytes``. Not counted are memory of the process and the CUDA
    context, and the workspace of cuDNN. Code is run eagerly: for :class:`~lightning_fasttrain.CompileBlocks` the result
    is an upper bound.

    With ``strategy``, one rank of ``world`` is predicted. Under :class:`~lightning_fasttrain.FSDP2Strategy`, also with
    ``tensor_parallel`` or ``context_parallel``, the strategy's own code shards the model and runs the step, with
    collectives that move nothing: gathered parameters, their padding and unsharded gradients are counted as they come
    and go, and ``batch`` is the batch of this rank. Not counted is what communication libraries allocate. Under
    :class:`~lightning_fasttrain.ZeROStrategy`, whose engine cannot run without memory, parameters, gradients, optimizer
    state and buffers follow from formulas that are tested against the engine, and the rest is traced without sharding.
    Under DDP its buckets, a second copy of the gradients, are added. What a strategy offloads is in ``host_bytes``.

    Blocks under :class:`~lightning_fasttrain.CompileBlocks` run as the graphs that the compiler's partition makes of
    their forward and backward: what it keeps for the backward is counted, and what fused kernels hold in registers is
    not. Nothing is compiled.

    Values read from tensors are unknown. Where they decide shapes, as lengths and masks do, the peak is a range:
    ``least_bytes`` where masks select nothing, ``peak_bytes`` where they select everything and a length is the longest
    axis of the batch.

    Args:
        module: a function that builds the model, such as ``lambda: Net(...)``, or an existing model, which is neither
            changed nor copied in memory. A LightningModule brings its ``training_step`` and ``configure_optimizers``.
        batch: one batch of the loader, or the loader; only shapes and dtypes matter.
        loss: (module, batch) → loss, instead of ``training_step``.
        optimizer: parameters → optimizer, a :class:`~lightning_fasttrain.optim.NamedOptimizer`, or the optimizer of an
            existing ``module``, which is not changed; instead of ``configure_optimizers``.
        techniques: the techniques, as for the Trainer.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"`` or ``"16-true"``, as in Lightning.
        device: the device whose allocator and kernels are assumed, ``"cuda"`` or ``"cpu"``; neither is used.
        strategy: the strategy, as for the Trainer: ``"ddp"``, Lightning's ``DDPStrategy``, or one of ours; it is not
            changed. None predicts a single device.
        world: number of ranks under ``strategy``.
        rank: the rank to predict; those with the first shards hold most.

    Returns:
        A report with ``peak_bytes`` and its parts; print it for a table.

    Raises:
        TypeError: no model, no loss, no optimizer, a model that cannot be copied, or a strategy that cannot be
            predicted.
        ValueError: an unknown precision or device, conflicting techniques, micro-batches of a module that steps its
            optimizers itself, or code that fails with every value that is assumed; with ``world``: ``rank`` is not
            below it, there is no strategy or an open ``stage="auto"``, weights are quantised, or this process has
            joined a process group.

    Example:
        >>> report = predict_memory(
        ...     lambda: nn.Linear(1000, 1000, bias=False),
        ...     torch.zeros(1000, 1000),
        ...     loss=lambda net, batch: net(batch).sum(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        ...     device="cpu",
        ... )
        >>> report.peak_bytes, report.phase, report.at_peak["optimizer state"]
        (20000004, 'forward', 4000000)
        >>> from lightning_fasttrain.strategy import FSDP2Strategy
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
        >>> shard = predict_memory(
        ...     net,
        ...     torch.zeros(8, 64),
        ...     loss=lambda net, batch: net(batch).sum(),
        ...     optimizer=torch.optim.AdamW,
        ...     device="cpu",
        ...     strategy=FSDP2Strategy(),
        ...     world=64,
        ... )
        >>> shard.peaks["gradients"]  # of 4 blocks with 64 rows and a bias, one of 64 parts each, in float32
        1040

    Source:
        Ours, on torch's fake tensors; what differs on CUDA follows PyTorch's sources. The example
        ``memory_prediction.py`` compares it with :class:`~lightning_fasttrain.profiling.PeakMemory` on the CPU and with
        the caching allocator.
    """
    settings = {"loss": loss, "optimizer": optimizer, "techniques": techniques, "precision": precision}
    (report,) = predict_strategies(module, batch, [strategy], **settings, device=device, world=world, rank=rank)
    return report


def predict_strategies(
    module: nn.Module | Factory,
    batch: object,
    strategies: Sequence[object],
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    techniques: Sequence[Technique] = (),
    precision: str = "32-true",
    device: str = "cuda",
    world: int = 1,
    rank: int = 0,
    accumulate: int = 1,
    recorder: Recorder | None = None,
    warms_up: bool = True,
) -> list[MemoryReport]:
    """Predict the same step under each of several strategies, as :func:`predict_memory` does for one.

    DDP and the stages of ZeRO share a trace, and FSDP2 shares one with its offload, so that all strategies take about
    three times as long as a single device.

    Args:
        strategies: as ``strategy`` of :func:`predict_memory`; all other arguments are like there.
        accumulate: number of batches whose gradients are summed, unless a technique sets it.
        recorder: takes note of the operators of each traced step.
        warms_up: whether a whole step runs before the one that is predicted. Else only its update does, which takes
            40% less time, and gives parameters that the loss does not use a gradient and optimizer state, too.
    """
    one_of("precision", precision, PREDICTED_PRECISIONS)
    precision, batch = _AS_LARGE.get(precision, precision), batch_of(batch)
    one_of("device", device, DEVICES)
    techniques = check_together(techniques)
    ranks = [OneRank(strategy, world, rank) for strategy in strategies]
    traces: list[tuple[tuple[object, ...], list[OneRank]]] = []
    for one in ranks:
        key = one.key(precision)
        alike = next((group for other, group in traces if other == key), None)
        if alike is None:
            traces.append((key, alike := []))
        alike.append(one)
    found: dict[OneRank, MemoryReport] = {}
    for _, group in traces:
        planned = PredictedStep(group[0].precision(precision), device == "cuda", window=accumulate)
        surgery = _ask(techniques, planned)
        step = _Step(module, batch, loss, optimizer, surgery, planned, recorder or Recorder(), warms_up)
        with _collecting_rarely():
            reports = _find_range(functools.partial(_predict, step, group, device, precision), find_longest_axis(batch))
        found.update(zip(group, reports, strict=True))
    return [found[one] for one in ranks]


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Collect garbage more rarely: a trace makes many objects at once that live until its end."""
    before = gc.get_threshold()
    gc.set_threshold(30 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class _Step:
    """The step that is traced, with the techniques that change the model."""

    module: nn.Module | Factory
    batch: object
    loss: Loss | None
    optimizer: Optimizer | Callable[[Any], Optimizer] | None
    with_surgery: Sequence[Technique]
    planned: PredictedStep
    recorder: Recorder
    warms_up: bool


def _predict(
    step: _Step,
    ranks: Sequence[OneRank],
    device: str,
    precision: str,
    truth: bool,
    number: int,
    selected: int | None,
) -> list[MemoryReport]:
    """Trace a step with these values where code reads values from tensors, and report on each of ``ranks``."""
    on_cuda = step.planned.on_cuda
    multiple, workspace = (MIN_BLOCK_BYTES, CUDA_WORKSPACE) if on_cuda else (1, CPU_WORKSPACE)
    assumed = {"truth": truth, "number": number, "selected": selected}
    trace = AllocationTrace(multiple, workspace, KEPT, step.recorder, **assumed)
    try:
        with isolate_rng(include_cuda=False), explaining_errors():
            since = _trace_steps(trace, step, ranks)
    except Exception as error:
        if trace.assumed:
            raise _FailedOnAssumedValues from error
        raise
    step.recorder.finish(trace.micro_batches, step.planned.window, ranks[0])
    reports = []
    for one in ranks:
        allocations = one.allocations(trace.allocations, since)
        host = one.host_allocations(trace.allocations, since)
        step.recorder.note_memory(allocations, since)
        reserved = place_in_blocks(allocations) if on_cuda else None
        notes = [*step.planned.notes, *one.notes(on_cuda)]
        if trace.assumed:
            notes.append(_ASSUMED)
        about = {"device": device, "precision": precision, "notes": tuple(notes), "nvme_bytes": one.nvme_bytes}
        reports.append(report(allocations, since, reserved, host_bytes=peak_of(host, since), **about))
    return reports


class _FailedOnAssumedValues(Exception):
    """The code raised an error after a value was assumed, which may be the reason."""


def _find_range(run: Callable[[bool, int, int | None], list[MemoryReport]], longest: int) -> list[MemoryReport]:
    """Run with the values that may be read from tensors, at most four times; once where none is read."""
    most: dict[bool, list[MemoryReport]] = {}
    failure: BaseException | None = None
    # A condition may be a check that must hold, add work or, like LayerDrop's, skip it.
    for truth in (True, False):
        try:
            # An integer is taken for the longest axis of the batch.
            most[truth] = run(truth, longest, None)
        except _FailedOnAssumedValues as error:
            failure = error.__cause__
        else:
            if _ASSUMED not in most[truth][0].notes:
                return most[truth]
    # A loss may need one selected element: DebertaV2 in test_the_peak_is_predicted_within_five_percent.
    for truth, selected in itertools.product(list(most)[:1], (0, 1)):
        try:
            least = run(truth, 1, selected)
        except _FailedOnAssumedValues as error:
            failure = error.__cause__
        else:
            return [join_range(reports, _RANGE) for reports in zip(least, *most.values(), strict=True)]
    why = f"a prediction has no values, and with assumed ones the code raises {type(failure).__name__}: {failure}"
    way_out = "Pass loss=, a function of (module, batch) that does not need values"
    raise ValueError(explain("the code branches on values read from tensors", why, way_out)) from failure


def _ask(techniques: Sequence[Technique], planned: PredictedStep) -> list[Technique]:
    """Let each technique add its share to ``planned``; return those to apply to the model."""
    for technique in techniques:
        # For an unknown class only the effect of apply() on the model is seen.
        if not technique.predicted:
            name = type(technique).__name__
            planned.notes.append(f"{name} cannot be predicted: memory that its hooks keep or free is not counted.")
    with_surgery = []
    for technique in techniques:
        surgeon = technique.predict(planned)
        if surgeon is not None:
            with_surgery.append(surgeon)
    return with_surgery


def _trace_steps(trace: AllocationTrace, step: _Step, ranks: Sequence[OneRank]) -> int:
    """Run two steps under ``trace``; return the time at which the second began."""
    loss, planned = step.loss, step.planned
    mode, plugin = FakeMode(), PRECISIONS[planned.precision]()
    planned.not_stored = trace.not_stored
    with ExitStack() as undo:
        dtype = torch.bfloat16 if planned.precision == "bf16-true" else None
        net = undo.enter_context(fake_model(step.module, step.with_surgery, dtype, mode))
        # Settled after the surgery, which may have added weights.
        settle_(net, mode, dtype)
        trainer = undo.enter_context(attached_trainer(net))
        forward = undo.enter_context(ranks[0].shard(net, forward_of(net, loss, plugin), planned, mode))
        # Asked for only now, since techniques may have imported bitsandbytes.
        trace.workspace = {**trace.workspace, **quantized_workspace()}
        with AssumedNumbers(truth=False):
            steppers, schedulers = _make_optimizers(net, step)
        if trainer is not None:
            give_optimizers(trainer, steppers, schedulers)
        for one in ranks:
            one.count_states(net, steppers[0], planned.precision)
        for act in planned.on_optimizer:
            for stepper in steppers:
                act(stepper)
        # Fake tensors do not support compiled code, such as torchao's step.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        # The trace begins after the optimizer is built, which does not belong to a step.
        undo.enter_context(trace)
        undo.enter_context(one_document_a_row(step.batch))
        undo.enter_context(trace.watch(net))
        # With prefetching the next batch exists too, until the end of the steps.
        with AssumedArrays(trace):
            data, *_ahead = _load_batches(trace, step, net, plugin, mode)
        undo.enter_context(AsOnCuda(trace) if planned.on_cuda else AssumedArrays(trace))
        if planned.on_cuda:
            for stepper in steppers:
                step_in_lists_(stepper)
            # Autograd runs the backward in a thread of its own, and each thread has a handle of cuBLAS.
            trace.reserve(2 * CUBLAS_WORKSPACE, "two cuBLAS workspaces")
            undo.enter_context(traced_as("cuda"))
        run = functools.partial(step_as_trainer, trace, forward, data, steppers[0], planned)
        warm_up = functools.partial(run, warms_up=True)
        if loss is None and isinstance(net, L.LightningModule) and not net.automatic_optimization:
            undo.enter_context(lend_optimizers(net, trace, steppers, schedulers, planned))
            run = warm_up = functools.partial(step_by_itself, trace, forward, data, steppers, planned)
        elif not step.warms_up:
            warm_up = functools.partial(leave_states, trace, steppers[0], planned)
        since = 0
        for act in (warm_up, run):
            since = trace.now
            step.recorder.begin_step()
            act()
            _mark_state(trace, net, steppers)
    return since


def _load_batches(trace: AllocationTrace, step: _Step, net: nn.Module, plugin: Precision, mode: FakeMode) -> list[Any]:
    """Return the batch without memory, after the hooks of its transfer, and the one that is prefetched meanwhile."""
    data = plugin.convert_input(fake_batch(step.batch, mode))
    if step.loss is None and isinstance(net, L.LightningModule):
        data = net.on_after_batch_transfer(net.on_before_batch_transfer(data, 0), 0)
    batches = [trace.mark_all(data, "inputs")]
    if step.planned.on_cuda and step.planned.prefetches:
        batches.append(trace.mark_all(fake_batch(data, mode), "inputs"))
    return batches


def forward_of(net: nn.Module, loss: Loss | None, plugin: Precision) -> Callable[[Any], Any]:
    """Return the function from a batch to its loss: ``loss``, or the ``training_step`` of ``net``."""
    if loss is None and not isinstance(net, L.LightningModule):
        why = "only a LightningModule has a training_step"
        way_out = "Pass loss=, a function of (module, batch)"
        raise TypeError(explain(f"{type(net).__name__} without loss=", why, way_out))

    def step(batch: object) -> Any:
        with plugin.forward_context():
            if loss is not None:
                return loss(net, batch)
            assert isinstance(net, L.LightningModule)
            if is_param_in_hook_signature(net.training_step, "batch_idx", min_args=2):  # as in Lightning
                return net.training_step(batch, 0)
            return net.training_step(batch)

    return step


def _make_optimizers(net: nn.Module, step: _Step) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers, and the schedulers of the module."""
    if isinstance(step.optimizer, Optimizer):
        return [_copy_optimizer(step.optimizer, step.module, net)], []
    if step.optimizer is not None:
        return [make_optimizer(step.optimizer, net)], []
    if not isinstance(net, L.LightningModule):
        why = "only a LightningModule has configure_optimizers"
        way_out = "Pass optimizer=, a function of the parameters: lambda p: torch.optim.AdamW(p)"
        raise TypeError(explain(f"{type(net).__name__} without optimizer=", why, way_out))
    optimizers, schedulers = configured_optimizers(net)
    if len(optimizers) > 1 and step.loss is not None:
        what = f"loss= and {type(net).__name__} with {len(optimizers)} optimizers"
        why = "it is not known which of them steps after this loss"
        raise ValueError(explain(what, why, "Pass optimizer= too, or neither of them"))
    return optimizers, schedulers


def _copy_optimizer(optimizer: Optimizer, module: object, net: nn.Module) -> Optimizer:
    """Return an optimizer like ``optimizer``, which holds parameters of ``module``, for those of its copy ``net``."""
    names = names_of_parameters(module) if isinstance(module, nn.Module) else {}
    parameters = dict(net.named_parameters())
    twin, groups = make_twin(optimizer), []
    for group in optimizer.param_groups:
        missing = [parameter for parameter in group["params"] if names.get(parameter) not in parameters]
        if missing:
            what = f"{type(optimizer).__name__} with {len(missing)} tensors that are not parameters of the module"
            way_out = "Pass the module that the optimizer was made for, or a function that makes it"
            raise ValueError(explain(what, "the memory of its state cannot be predicted", way_out))
        groups.append({**group, "params": [parameters[names[p]] for p in group["params"]]})
    twin.param_groups = groups
    twin.state = early_state(type(optimizer), parameters_of(twin))
    return twin


def _mark_state(trace: AllocationTrace, net: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    names = names_of_parameters(net)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(state):
                trace.mark(tensor, "optimizer state", names.get(parameter, ""))


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Explain errors of code that needs something that a prediction does not have."""
    try:
        yield
    except _UNKNOWN as error:
        why = "the shape of its result depends on tensor values, which a prediction does not have"
        way_out = "Pass loss=, a function of (module, batch) that does not need it"
        raise ValueError(explain(f"{error.func} cannot be predicted", why, way_out)) from error


@check_arguments
def count_flops(module: nn.Module | Factory, batch: Batch, *, loss: Loss | None = None) -> int:
    """Count the floating-point operations of a plain forward and backward, without computing anything.

    Matrix products, convolutions and attention (causal attention counts as full) are counted, with two FLOPs per
    multiply-add. Recomputation by techniques is excluded: pass the model as it is before them. The result is therefore
    the count that "model FLOPs utilization" uses.

    Args:
        module: a function that builds the model, or the model, which is not changed.
        batch: one batch of the loader.
        loss: (module, batch) → loss, instead of ``training_step``.

    Raises:
        TypeError: no model, no loss, or a model that cannot be copied.
        ValueError: the code has shapes that depend on tensor values.

    Example:
        >>> import torch
        >>> count_flops(nn.Linear(10, 20), torch.zeros(5, 10), loss=lambda net, batch: net(batch).sum())
        4000

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; formulas of torch's
        ``FlopCounterMode``.
    """
    mode, counter = FakeMode(), FlopCounter()
    # Nothing is drawn on CUDA, and asking for its state would initialize it.
    with isolate_rng(include_cuda=False), explaining_errors():
        net = fake_module(module, mode)
        forward = forward_of(net, loss, Precision())
        # As matrix products, attention has no recomputation in its backward.
        with attached_trainer(net), mode, sdpa_kernel(SDPBackend.MATH), counter:
            loss_of(forward(fake_batch(batch, mode))).backward()
    return counter.total
