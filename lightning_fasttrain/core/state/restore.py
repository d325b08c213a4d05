"""Save and restore everything a training step changes besides gradients."""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torchmetrics import Metric

from lightning_fasttrain.core.state.rng import random_state, set_random_state

_OF_MODULES = frozenset(vars(nn.Module()))  # hooks and the like are not results of a step
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (int, float, str, type(None))
_LARGE = 2**26  # bytes: such tensors are data or tables that a step only reads


def remember(models: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember random states and what the ``models`` hold beside parameters; returns how to put it back.

    That is buffers, metrics, and attributes that are numbers, strings, tensors or containers (the container itself, not
    what lies deeper). What a step changes elsewhere is not undone. It can be restored several times.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.losses = []
        >>> restore_all = remember([net])
        >>> net.losses.append(0.5)
        >>> restore_all()
        >>> net.losses
        []
    """
    generators = random_state()
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    places = [(module._buffers, name) for module in modules for name in module._buffers]
    buffers = [(held, name, held[name], _copy_of(held[name])) for held, name in places]
    metrics = [module for module in modules if isinstance(module, Metric)]
    states = [(metric, read_metric(metric)) for metric in metrics]
    restore_attributes = remember_attributes(module for module in modules if not isinstance(module, Metric))

    def restore_all() -> None:
        set_random_state(generators)
        with torch.no_grad():
            for held, name, buffer, before in buffers:
                # The same tensor, since DDP and others hold it.
                held[name] = buffer
                if buffer is not None and before is not None:
                    _write_back(buffer, before)
        for metric, state in states:
            copies = {name: _copy_of(value) for name, value in state.values.items()}  # it may be restored again
            write_metric_(metric, MetricState(copies, state.updates))
        restore_attributes()

    return restore_all


def remember_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember the attributes of these modules, as :func:`remember` does; returns how to put them back."""
    attributes = [(module, dict(_attributes(module))) for module in modules]

    def restore_all() -> None:
        for module, before in attributes:
            _restore_attributes(module, before)

    return restore_all


def remember_gradients(model: nn.Module) -> Callable[[], None]:
    """Remember the gradients that are there; returns how to put them back."""
    grads: list[tuple[nn.Parameter, Tensor | None]] = []
    for parameter in model.parameters():
        grads.append((parameter, _copy_of(parameter.grad)))

    def restore_all() -> None:
        for parameter, before in grads:
            # A copy, since the state may be restored again.
            parameter.grad = _copy_of(before)

    return restore_all


def _attributes(module: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Name → the value, and a copy of what it holds."""
    for name, value in vars(module).items():
        if name in _OF_MODULES:
            continue
        # Exactly these types: a subclass may not support being emptied and filled.
        kept = type(value) in _CONTAINERS or (isinstance(value, Tensor) and value.nbytes < _LARGE)
        if kept or isinstance(value, _PLAIN):
            yield name, (value, _copy_of(value))


def _restore_attributes(module: nn.Module, before: dict[str, tuple[object, object]]) -> None:
    now = vars(module)
    for name in [name for name, value in now.items() if isinstance(value, Tensor) and name not in before]:
        del now[name]  # made by the step, and perhaps it holds a graph
    for name, (value, copy) in before.items():
        # Past __setattr__, which a module may have of its own.
        now[name] = value
        _refill(value, copy)


def _refill(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            _write_back(value, copy)
    elif isinstance(value, _CONTAINERS):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(copy)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    """Restore a tensor only where it was changed, since a graph that saved it takes any write for a change."""
    if not torch.equal(tensor, before):
        tensor.copy_(before)


def _copy_of(value: object) -> Any:
    """Copy a tensor or a container; None and plain values stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, _CONTAINERS) else value


class MetricState(NamedTuple):
    """Name → value, and the number of updates that they are of."""

    values: Mapping[str, Tensor | list[Tensor]]
    updates: int


def read_metric(metric: Metric) -> MetricState:
    """Copies of its states."""
    return MetricState(metric._copy_state_dict(), metric._update_count)


def write_metric_(metric: Metric, state: MetricState) -> None:
    """Give it these states, which it keeps."""
    for name, value in state.values.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = state.updates, None


def add_to_metric_(metric: Metric, earlier: MetricState) -> None:
    """Have it be of the updates ``earlier`` too.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update([1.0, 2.0])
        >>> earlier = read_metric(metric)
        >>> metric.reset()
        >>> metric.update(6.0)
        >>> add_to_metric_(metric, earlier)
        >>> metric.compute()
        tensor(3.)
    """
    here = metric._update_count
    if not here:
        write_metric_(metric, earlier)
    elif earlier.updates:
        # torchmetrics takes what is here for one update, so in a mean of updates the earlier ones are counted in those.
        metric._update_count = 1 + earlier.updates / here  # type: ignore[assignment]
        metric._reduce_states(dict(earlier.values))
        metric._update_count = here + earlier.updates
    metric._computed = None


def show_step_value_(metric: Metric, value: object) -> None:
    """Have Lightning log ``value`` for the step; for the epoch it computes."""
    metric._forward_cache, metric._computed = value, None


class Surroundings:
    """Generators, autocast, default dtype and default device of this moment.

    Args:
        inputs: those of the forward; the generators and autocast of their devices count beside the host's.

    Example:
        >>> around = Surroundings([])
        >>> first = torch.rand(2)
        >>> with around.restored():
        ...     again = torch.rand(2)
        >>> torch.equal(first, again)
        True
    """

    def __init__(self, inputs: Iterable[object]) -> None:
        devices = {leaf.device for leaf in inputs if isinstance(leaf, Tensor)}
        self._host = _HostGenerators()
        self._of_torch = _TorchGenerators(devices)
        kinds = {"cpu"} | {device.type for device in devices}
        self._autocast = {kind: _autocast_of(kind) for kind in kinds}
        # Precision plugins of Lightning set it around the forward alone: torch.rand() would draw other values.
        self._dtype = torch.get_default_dtype()
        self._device = _default_device()

    def look(self) -> None:
        """Look, at the end of the forward, which generators it drew from."""
        self._host.look()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these states within a ``with`` block; afterwards those from before the block are back."""
        dtype, generators = torch.get_default_dtype(), self._of_torch.now()
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            torch.set_default_dtype(self._dtype)
            self._of_torch.restore()
            try:
                yield
            finally:
                generators.restore()
                torch.set_default_dtype(dtype)

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        if self._host.changed:
            yield self._host.restored()
        if self._device is not None:
            yield self._device
        for kind, then in self._autocast.items():
            # Also where it is enabled now: leaving the outermost autocast clears its cache of weights.
            if then[0] or then != _autocast_of(kind):
                enabled, dtype, cached = then
                yield torch.autocast(kind, dtype, enabled, cache_enabled=cached)


def _autocast_of(kind: str) -> tuple[bool, torch.dtype | None, bool]:
    """Return whether autocast is on for such devices, its dtype, and whether it keeps the weights that it casts."""
    if not torch.amp.is_autocast_available(kind):
        return False, None, False
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _default_device() -> torch.device | None:
    """Return the device that ``with torch.device(...)`` or ``set_default_device`` has set in this thread."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return torch.device(modes[-1].device) if modes else None


class _TorchGenerators:
    """The states of torch's generators: the host's, and those of devices that are in use."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.host = torch.get_rng_state()
        self.others: dict[torch.device, Tensor] = {}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                # To ask for the state would start the device. Fake tensors may be on one that is not there.
                if hasattr(module, "is_initialized") and module.is_initialized():
                    self.others[device] = module.get_rng_state(device)

    def now(self) -> "_TorchGenerators":
        return _TorchGenerators(self.others)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.others.items():
            torch.get_device_module(device).set_rng_state(state, device)


class _HostGenerators:
    """The states of Python's and NumPy's generators, which most forwards do not draw from.

    Setting them takes longer than comparing them.
    """

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = _read_numpy_state()
        self.changed = True  # until it is known

    def look(self) -> None:
        now = _HostGenerators()
        self.changed = now.numpy is not self.numpy or now.python != self.python

    @contextmanager
    def restored(self) -> Iterator[None]:
        now = _HostGenerators()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


_BYTES = 625 * 4  # of the state of an MT19937, NumPy's usual generator: 624 numbers and the position among them
_last_read: tuple[bytes | None, Any] = (None, None)  # the memory of NumPy's generator, and its state


def _read_numpy_state() -> Any:
    """Return the state of NumPy's global generator; the same object as long as nothing was drawn.

    NumPy takes 45 µs to return it. Twice in each block, that would make this recomputation slower than PyTorch's; to
    compare its memory takes less than one.
    """
    global _last_read
    generator = np.random.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    memory, state = _last_read
    # Before the state is read: another thread may draw in between.
    now = ctypes.string_at(generator.ctypes.state_address, _BYTES)
    if now != memory:
        state: Any = np.random.get_state()
        # The second one of a pair of normal numbers is stored elsewhere, and would be drawn unseen.
        _last_read = (None if state[3] else now), state
    return state
