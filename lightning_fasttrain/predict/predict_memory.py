"""The memory that a training step will need, without needing it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.data.accumulate_gradients import loss_of
from lightning_fasttrain.data.float32_gradient_sums import sum_gradients_in_float32
from lightning_fasttrain.optim import release_gradients_
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.optim.named.state_bytes import tensors_in
from lightning_fasttrain.predict.allocation_trace import AllocationTrace
from lightning_fasttrain.predict.cuda_dispatch import CUBLAS_WORKSPACE, GRANULE, AsOnCuda, step_in_lists_
from lightning_fasttrain.predict.cuda_workspace import CUDA_WORKSPACE
from lightning_fasttrain.predict.data_dependent_values import AssumedNumbers
from lightning_fasttrain.predict.fake_model import Factory, fake_batch, fake_module, settle_
from lightning_fasttrain.predict.kernel_workspace import CPU_WORKSPACE, KEPT, quantized_workspace
from lightning_fasttrain.predict.memory_report import MemoryReport, report
from lightning_fasttrain.technique import Technique, apply, check_together
from lightning_fasttrain.technique.predicted_step import PredictedStep

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    # Autocast is switched on for one kind of device, and fake tensors are on the CPU.
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
}
DEVICES = ("cpu", "cuda")
_ASSUMED = "The code reads numbers out of tensors (.item()): 1 was assumed for each."
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)

Loss = Callable[[Any, Any], Any]


def predict_memory(
    module: nn.Module | Factory,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    techniques: Sequence[Technique] = (),
    precision: str = "32-true",
    device: str = "cuda",
) -> MemoryReport:
    """Predict the peak memory of one training step, by category, without allocating the model.

    Two steps are run on tensors that have shapes and lifetimes but no memory, in the Trainer's order: forward,
    ``zero_grad``, backward, optimizer step. The second is the steady state, in which the optimizer has its state and
    the last step's gradients are still there during the forward. So a model far larger than this machine can be
    asked about; it takes seconds.

    Counted is what tensors take, the batch included, as :class:`~lightning_fasttrain.run.PeakMemory` would measure it.
    Not counted: what the process and CUDA's context take, fragmentation, and most of what kernels allocate for
    themselves. Of that, convolutions, BatchNorm and LSTMs on the CPU are in; and on CUDA one cuBLAS workspace, sums
    over rows, and attention, but not cuDNN's. Code is run eagerly: for
    :class:`~lightning_fasttrain.CompileBlocks` this is an upper bound.

    Args:
        module: a function that builds the model, such as ``lambda: Net(...)``, or a model that exists, which is left
            as it is, its memory uncopied. A LightningModule brings its ``training_step`` and ``configure_optimizers``.
        batch: one batch, as the loader gives it; only shapes and types matter.
        loss: (module, batch) → loss, instead of ``training_step``.
        optimizer: parameters → optimizer, or a :class:`~lightning_fasttrain.NamedOptimizer`, instead of
            ``configure_optimizers``.
        techniques: those to be used, as the Trainer would get them.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``, as Lightning means them.
        device: whose allocator and kernels to assume, ``"cuda"`` or ``"cpu"``; none is touched.

    Returns:
        Its ``peak_bytes`` and what they consist of; print it for a table.

    Raises:
        TypeError: no model, no loss, no optimizer, or a model that cannot be copied.
        ValueError: an unknown precision or device, techniques that do not go together, manual optimisation, or code
            whose shapes depend on the values in tensors.

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

    Source:
        Ours, on torch's fake tensors. Held against :class:`~lightning_fasttrain.run.PeakMemory` on the CPU by
        ``examples/memory_prediction.py``. What differs on CUDA follows PyTorch's documentation and sources; a test
        for machines with a GPU holds it against the caching allocator.
    """
    one_of("precision", precision, tuple(PRECISIONS))
    one_of("device", device, DEVICES)
    techniques = check_together(techniques)
    on_cuda = device == "cuda"
    planned = PredictedStep(precision, on_cuda)
    surgeons = _ask(techniques, planned)
    granule, workspace = (GRANULE, CUDA_WORKSPACE) if on_cuda else (1, CPU_WORKSPACE)
    # Code that reads truth values out of tensors may raise for one of the two.
    for truth in (True, False):
        trace = AllocationTrace(granule, workspace, KEPT, truth)
        try:
            with isolate_rng(include_cuda=False), explaining_errors():
                since = _trace_steps(trace, module, batch, loss, optimizer, surgeons, planned)
            notes = [*planned.notes, *([_ASSUMED] if trace.assumed else [])]
            return report(trace.allocations, since, device=device, precision=precision, notes=tuple(notes))
        except Exception as error:
            if not trace.assumed:
                raise
            failure = error
    why = f"there are none, and with those that were assumed it ends in {type(failure).__name__}: {failure}"
    way_out = "Give loss=, a function of (module, batch) that goes without"
    raise ValueError(explain("the code reads numbers out of tensors and decides by them", why, way_out)) from failure


def _ask(techniques: Sequence[Technique], planned: PredictedStep) -> list[Technique]:
    """Have each technique write its share into ``planned``; those to operate on the model with."""
    for technique in techniques:
        if not technique.predicted:  # of a stranger's class only what apply() does to the model is seen
            name = type(technique).__name__
            planned.notes.append(f"{name} is not known here: what its hooks keep or free is not counted.")
    told = [technique.predict(planned) for technique in techniques]
    return [technique for technique in told if technique is not None]


def _trace_steps(
    trace: AllocationTrace,
    module: nn.Module | Factory,
    batch: Any,
    loss: Loss | None,
    optimizer: Callable[[Any], Optimizer] | None,
    surgeons: Sequence[Technique],
    planned: PredictedStep,
) -> int:
    """Run two steps under ``trace``; the time at which the second began."""
    mode, plugin = FakeTensorMode(allow_non_fake_inputs=True), PRECISIONS[planned.precision]()
    with ExitStack() as undo:
        dtype = torch.bfloat16 if planned.precision == "bf16-true" else None
        net = fake_module(module, mode, dtype)
        undo.enter_context(mode)
        undo.enter_context(apply(net, surgeons))
        settle_(net, mode, dtype)  # what adapters have added
        trace.workspace = {**trace.workspace, **quantized_workspace()}  # now: techniques may have imported bitsandbytes
        with AssumedNumbers(truth=False):
            stepper = _make_optimizer(net, optimizer)
        for act in planned.on_optimizer:
            act(stepper)
        undo.enter_context(trace)  # the optimizer is made before: how it builds its state is no part of a step
        undo.enter_context(trace.watch(net))
        data = plugin.convert_input(fake_batch(batch, mode))
        if loss is None and isinstance(net, L.LightningModule):
            data = net.on_after_batch_transfer(net.on_before_batch_transfer(data, 0), 0)
        batches = [trace.mark_all(data, "inputs")]
        if planned.on_cuda and planned.prefetches:
            batches.append(trace.mark_all(fake_batch(data, mode), "inputs"))
        if planned.on_cuda:
            step_in_lists_(stepper)
            trace.reserve(CUBLAS_WORKSPACE, "cuBLAS workspace")
            undo.enter_context(AsOnCuda())  # for the backward too, which runs blocks once more
        forward = forward_of(net, loss, plugin)
        since = 0
        for _ in range(2):
            since = trace.now
            _step(trace, forward, batches[0], stepper, planned)
            _mark_state(trace, net, stepper)
    return since


def _step(
    trace: AllocationTrace, forward: Callable[[Any], Any], batch: Any, optimizer: Optimizer, planned: PredictedStep
) -> None:
    """One optimizer step, in the order of the Trainer or, with several parts, of our accumulation."""
    parts = list(planned.split(batch))
    # Gradients are there from the second part on, so the later ones need no more.
    parts = (parts * min(planned.window, 2))[:2]
    trace.phase = "forward"
    if len(parts) == 1:
        output = forward(batch)
        optimizer.zero_grad()
        trace.phase = "backward"
        _backward(loss_of(output))
    else:
        output = None
        optimizer.zero_grad()
        with sum_gradients_in_float32(p for group in optimizer.param_groups for p in group["params"]):
            for part in parts:
                trace.phase = "forward"
                loss = loss_of(forward(part))
                trace.phase = "backward"
                _backward(loss)
                del loss  # it holds the graph, which the next part's forward would have beside its own
    trace.phase = "optimizer step"
    if not (planned.on_cuda and isinstance(optimizer, HostOptimizer)):  # a step in host memory takes none of the device
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which fake tensors cannot
            optimizer.step()
    if planned.releases:
        release_gradients_(p for group in optimizer.param_groups for p in group["params"])


def _backward(loss: Tensor) -> None:
    """As ``loss.backward()``, which :class:`AsOnCuda` would take for one function and see nothing inside of it."""
    root = torch.ones_like(loss)
    _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def forward_of(net: nn.Module, loss: Loss | None, plugin: Precision) -> Callable[[Any], Any]:
    """What makes a loss of a batch: ``loss``, or the ``training_step`` of ``net``."""
    if loss is None and not isinstance(net, L.LightningModule):
        why = "only a LightningModule has a training_step"
        way_out = "Give loss=, a function of (module, batch)"
        raise TypeError(explain(f"{type(net).__name__} without loss=", why, way_out))

    def step(batch: Any) -> Any:
        with plugin.forward_context():
            if loss is not None:
                return loss(net, batch)
            assert isinstance(net, L.LightningModule)
            takes_index = is_param_in_hook_signature(net.training_step, "batch_idx", min_args=2)  # as Lightning asks
            return net.training_step(batch, 0) if takes_index else net.training_step(batch)

    return step


def _make_optimizer(net: nn.Module, make: Callable[[Any], Optimizer] | None) -> Optimizer:
    if make is not None:
        return make_optimizer(make, net)
    if not isinstance(net, L.LightningModule):
        why = "only a LightningModule has configure_optimizers"
        way_out = "Give optimizer=, a function of the parameters: lambda p: torch.optim.AdamW(p)"
        raise TypeError(explain(f"{type(net).__name__} without optimizer=", why, way_out))
    optimizers = configured_optimizers(net)
    if len(optimizers) != 1 or not net.automatic_optimization:
        raise ValueError(
            explain(
                f"{type(net).__name__} with {len(optimizers)} optimizers, "
                f"automatic_optimization={net.automatic_optimization}",
                "only the Trainer's own order of a step, with one optimizer, is known",
                "Give loss= and optimizer= for the part you want to know about",
            )
        )
    return optimizers[0]


def _mark_state(trace: AllocationTrace, net: nn.Module, optimizer: Optimizer) -> None:
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    for parameter, state in optimizer.state.items():
        for tensor in tensors_in(state):
            trace.mark(tensor, "optimizer state", names.get(parameter, ""))


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Say what to do where the code needs what a prediction does not have."""
    try:
        yield
    except _UNKNOWN as error:
        why = "the shape of its result depends on values, and there are none"
        way_out = "Give loss=, a function of (module, batch) that goes without"
        raise ValueError(explain(f"{error.func} cannot be predicted", why, way_out)) from error
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        way_out = "Give loss= and optimizer= that go without"
        raise ValueError(explain("the code uses self.trainer", "a prediction has none", way_out)) from error
