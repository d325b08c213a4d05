"""Run a forward again with the random states, autocast, and default dtype and device that it had."""

import ctypes
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


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
