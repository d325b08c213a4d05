"""Run a training step on models and batches without memory: the same shapes, dtypes and ties, on the CPU."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import patch_all, patched
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.finetune.quantized.quantized_layer import fake_parts, is_quantized
from lightning_fasttrain.finetune.selection.float32_adapters import kept_in_float32
from lightning_fasttrain.memory.allocation_trace import AllocationTrace
from lightning_fasttrain.memory.fake_operators import AssumedNumbers
from lightning_fasttrain.micro_batching.accumulate_gradients import loss_of
from lightning_fasttrain.micro_batching.step_gradients import sum_gradients_in_float32
from lightning_fasttrain.optim import release_gradients_
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.technique import Technique, apply
from lightning_fasttrain.technique.declarations import PredictedStep

Factory = Callable[[], nn.Module]
_CPU = torch.device("cpu")


@contextmanager
def fake_model(
    module: nn.Module | Factory,
    techniques: Sequence[Technique] = (),
    dtype: torch.dtype | None = None,
    mode: FakeMode | None = None,
) -> Iterator[nn.Module]:
    """Yield a model without memory on which ``techniques`` operate; random states stay as they are.

    Args:
        module: as for :func:`fake_module`.
        techniques: those with surgery.
        dtype: as for :func:`fake_module`.
        mode: the fake mode of its tensors; by default a new one.
    """
    mode = mode or FakeMode()
    net = fake_module(module, mode, dtype)
    # Adapters draw their first weights; nothing is on a GPU.
    with mode, torch.random.fork_rng(devices=[]), apply(net, techniques):
        yield net


def fake_module(module: nn.Module | Factory, mode: FakeMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module without memory, or copy an existing one, which is not changed.

    Args:
        module: a function that builds it, or the module itself, on any device (including ``"meta"``).
        mode: the fake mode of its tensors.
        dtype: dtype of its floating-point parameters and buffers; None keeps theirs.

    Raises:
        TypeError: not a module nor a function that returns one, or a module that cannot be copied.
    """
    # An existing module may have no parameters before its configure_model.
    exists = isinstance(module, nn.Module)
    if not isinstance(module, nn.Module):
        with mode, AssumedNumbers(truth=False), warnings.catch_warnings():  # for nn.init.trunc_normal_
            # Modules such as nn.TransformerEncoder copy their layers, and copying reads an address.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            built = module() if callable(module) else module
        if not isinstance(built, nn.Module):
            why = f"expected an nn.Module, got {type(built).__name__}"
            way_out = "Pass an nn.Module, or a function without arguments that returns one"
            raise TypeError(explain(f"module={module!r}", why, way_out))
        module = built
    if exists or any(not _belongs(tensor, mode) for tensor in [*module.parameters(), *module.buffers()]):
        module = _copy_module(module, mode)
    if isinstance(module, L.LightningModule):
        with mode, AssumedNumbers(truth=False):
            # By Lightning's documentation a second call must do nothing.
            module.configure_model()
        module.log = module.log_dict = _say_nothing  # there is no Trainer to log to
    settle_(module, mode, dtype)
    return module


def fake_batch(batch: object, mode: FakeMode) -> Any:
    """Replace every tensor in ``batch`` by a fake one of the same shape and strides, on the CPU."""
    return apply_to_collection(batch, Tensor, lambda tensor: _make_fake(tensor, mode, tensor.dtype))


def find_longest_axis(batch: object) -> int:
    """Return the size of the longest axis of the tensors in ``batch``, at least 1."""
    longest = 1

    def measure(tensor: Tensor) -> Tensor:
        nonlocal longest
        longest = max(longest, *tensor.shape, 1)
        return tensor

    apply_to_collection(batch, Tensor, measure)
    return longest


def _belongs(tensor: Tensor, mode: FakeMode) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def _copy_module(module: nn.Module, mode: FakeMode) -> nn.Module:
    try:
        with FakeCopyMode(mode):
            # The second argument is deepcopy's memo: its entries count as copied already.
            copied = _fake_parameters(module, mode) | _quantized_parts(module, mode) | _copy_generators(module)
            return copy.deepcopy(module, copied)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        way_out = "Pass a function that builds it: lambda: MyModule(...)"
        raise TypeError(explain(f"{type(module).__name__} cannot be copied", why, way_out)) from error


def _fake_parameters(module: nn.Module, mode: FakeMode) -> dict[int, Any]:
    """Return what copies of dense parameters would be, whose own copying takes most of a module's time."""
    found: dict[int, Any] = {}
    for parameter in module.parameters():
        is_plain = type(parameter) is nn.Parameter and parameter.device == _CPU
        if is_plain and parameter.layout == torch.strided and parameter.is_contiguous():
            size, stride = parameter.size(), parameter.stride()
            fake: Any = mode.wrap(torch.empty_strided(size, stride, dtype=parameter.dtype, device="meta"))
            fake.requires_grad, fake._is_param = parameter.requires_grad, True
            found[id(parameter)] = fake
    return found


def _quantized_parts(module: nn.Module, mode: FakeMode) -> dict[int, Any]:
    with mode:
        return {key: part for m in module.modules() if is_quantized(m) for key, part in fake_parts(m).items()}


def _copy_generators(module: nn.Module) -> dict[int, torch.Generator]:
    """Their own copying would read a tensor that the mode makes fake."""
    generators = StepState([module], parameters=False, buffers=False).own_generators
    return {id(one): one.clone_state() for one in generators if isinstance(one, torch.Generator)}


def settle_(module: nn.Module, mode: FakeMode, dtype: torch.dtype | None) -> None:
    """Replace real tensors, or those on other devices, by fake CPU tensors in ``dtype``; tied parameters stay tied.

    Adapters stay in float32, as in the run.
    """
    settled: dict[Tensor, Tensor] = {}  # tensors hash by identity
    unrounded = kept_in_float32(module)
    for owner in module.modules():
        tables: tuple[Any, ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                rounded = tensor.is_floating_point() and tensor not in unrounded
                wanted = dtype if dtype is not None and rounded else tensor.dtype
                if tensor not in settled:
                    settled[tensor] = tensor
                    if tensor.device.type != "cpu" or tensor.dtype != wanted or not _belongs(tensor, mode):
                        settled[tensor] = _make_fake(tensor, mode, wanted)
                table[name] = settled[tensor]


def _make_fake(tensor: Tensor, mode: FakeMode, dtype: torch.dtype) -> Tensor:
    plain = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.dtype == dtype
    if plain and not isinstance(tensor, nn.Parameter):
        # The mode keeps tensors on one storage together.
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        # With its strides: an expanded tensor takes no extra memory.
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like


def _say_nothing(*_: object, **__: object) -> None:
    pass


Forward = Callable[[Any], Any]


def step_as_trainer(
    trace: AllocationTrace,
    forward: Forward,
    batch: object,
    optimizer: Optimizer,
    planned: PredictedStep,
    *,
    warms_up: bool = False,
) -> None:
    """Run one optimizer step, in the order of the Trainer or, with several micro-batches, of our accumulation.

    Of several, two are run, since gradients exist from the second on and later ones need no more; one of a step that
    ``warms_up``, which only leaves what the next step finds.
    """
    parts = list(planned.split(batch))
    trace.micro_batches = len(parts) * planned.window
    trace.phase = "forward"
    if trace.micro_batches == 1:
        output = forward(batch)
        optimizer.zero_grad()
        trace.phase = "backward"
        _backward(loss_of(output))
    else:
        output = None
        parts = (parts * 2)[warms_up:2]
        optimizer.zero_grad()
        with sum_gradients_in_float32(parameters_of(optimizer)):
            for number, part in enumerate(parts, start=1):
                trace.phase = "forward"
                with planned.without_reduction() if number < len(parts) else nullcontext():
                    loss = loss_of(forward(part))
                    trace.phase = "backward"
                    _backward(loss)
                # The graph would otherwise still exist beside that of the next micro-batch.
                del loss
    # Gradients of shards, which FSDP2 sets without the hooks of autograd.
    for parameter in parameters_of(optimizer):
        if isinstance(parameter.grad, DTensor):
            trace.mark(parameter.grad, "gradients")
    _update(trace, optimizer, planned)
    if planned.releases:
        release_gradients_(parameters_of(optimizer))


def leave_states(trace: AllocationTrace, optimizer: Optimizer, planned: PredictedStep) -> None:
    """Leave what :func:`step_as_trainer` does, gradients and the optimizer's state, without a forward and backward."""
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            trace.mark(parameter.grad, "gradients")
    _update(trace, optimizer, planned)
    if planned.releases:
        release_gradients_(parameters_of(optimizer))


def step_by_itself(
    trace: AllocationTrace, forward: Forward, batch: object, optimizers: Sequence[Optimizer], planned: PredictedStep
) -> None:
    """Run the ``training_step`` of a module with manual optimization, which :func:`lend_optimizers` prepares."""
    if len(list(planned.split(batch))) > 1 or planned.window > 1:
        why = "the module runs backwards and optimizers itself"
        way_out = "Call accumulate_gradients(step, batch, n, backward=self.manual_backward) in its training_step"
        raise ValueError(explain("micro-batches with automatic_optimization=False", why, way_out))
    trace.phase = "forward"
    forward(batch)
    if planned.releases:
        for optimizer in optimizers:
            release_gradients_(parameters_of(optimizer))


@contextmanager
def lend_optimizers(
    net: L.LightningModule,
    trace: AllocationTrace,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[object],
    planned: PredictedStep,
) -> Iterator[None]:
    """Give a module without a Trainer what it calls in manual optimization."""
    lent = [_LentOptimizer(trace, optimizer, planned) for optimizer in optimizers]
    trainer = SimpleNamespace(optimizers=list(optimizers))

    def manual_backward(loss: Tensor, *args: object, **kwargs: object) -> None:
        with _phase(trace, "backward"):
            _backward(loss)

    def toggle_optimizer(optimizer: Any) -> None:
        with patched(net, "_trainer", trainer):
            L.LightningModule.toggle_optimizer(net, getattr(optimizer, "optimizer", optimizer))

    def untoggle_optimizer(optimizer: Any) -> None:
        with patched(net, "_trainer", trainer):
            L.LightningModule.untoggle_optimizer(net, getattr(optimizer, "optimizer", optimizer))

    def clip_gradients(optimizer: Any, gradient_clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        parameters = parameters_of(getattr(optimizer, "optimizer", optimizer))
        if gradient_clip_val and gradient_clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)

    def lr_schedulers() -> Any:
        return _as_lightning_gives(schedulers)

    def lent_optimizers(use_pl_optimizer: bool = True) -> Any:
        return _as_lightning_gives(lent)

    methods = (manual_backward, toggle_optimizer, untoggle_optimizer, clip_gradients, lr_schedulers)
    lends = {method.__name__: method for method in methods}
    restore = patch_all(net, {**lends, "optimizers": lent_optimizers})
    try:
        yield
    finally:
        restore()


def _as_lightning_gives(things: Sequence[object]) -> Any:
    """Return the only one of them alone, several as a list, and None for none."""
    if len(things) == 1:
        return things[0]
    return list(things) or None


class _LentOptimizer:
    """Stands for Lightning's wrapper of an optimizer."""

    def __init__(self, trace: AllocationTrace, optimizer: Optimizer, planned: PredictedStep) -> None:
        self.optimizer = optimizer
        self._trace, self._planned = trace, planned

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], object] | None = None, **kwargs: object) -> None:
        if closure is not None:
            closure()
        with _phase(self._trace, self._trace.phase):
            _update(self._trace, self.optimizer, self._planned)


@contextmanager
def _phase(trace: AllocationTrace, name: str) -> Iterator[None]:
    before = trace.phase
    trace.phase = name
    yield
    trace.phase = before


def _update(trace: AllocationTrace, optimizer: Optimizer, planned: PredictedStep) -> None:
    trace.phase = "optimizer step"
    # A step in host memory takes no device memory.
    if not (planned.on_cuda and isinstance(optimizer, HostOptimizer)):
        optimizer.step()


def _backward(loss: Tensor) -> None:
    """Call backward without ``loss.backward()``, which ``AsOnCuda`` would treat as one opaque function."""
    root = torch.ones_like(loss)
    _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)
