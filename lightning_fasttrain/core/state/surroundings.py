"""Record the generators, autocast, default dtype and default device around a forward, to run it again as it was."""

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
        self.python: tuple[Any, ...] = random.getstate()
        self.numpy = _numpy.state()
        self.changed = True  # until it is known

    def look(self) -> None:
        self.changed = not _HostGenerators().is_same(self)

    def is_same(self, other: "_HostGenerators") -> bool:
        (_, numbers, normal), (_, others, other_normal) = self.python, other.python
        # The last number is the position, which each draw moves; after 624 draws all other numbers are replaced.
        same = numbers[-1] == others[-1] and numbers[:2] == others[:2] and normal == other_normal
        return same and self.numpy is other.numpy

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


class _Twister(ctypes.Structure):
    """The state of NumPy's MT19937: 624 numbers of 32 bits, and the position among them."""

    _fields_ = [("numbers", ctypes.c_uint64 * 312), ("position", ctypes.c_int)]


class _NumPyGenerator:
    """NumPy's global generator, whose state is read, in 60 µs, only after its position in memory has changed."""

    def __init__(self) -> None:
        self._generator: object = None
        self._twister: _Twister | None = None
        self._seen: tuple[int, int] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the state; the same object as long as nothing was drawn."""
        generator: Any = np.random.get_bit_generator()
        if generator is not self._generator:
            self._find(generator)
        # Before the state is read: another thread may draw in between.
        seen = self._look()
        if seen is None:
            return np.random.get_state(legacy=False)
        if seen != self._seen:
            self._state = np.random.get_state()
            # The second one of a pair of normal numbers is stored elsewhere, and would be drawn unseen.
            self._seen = None if self._state[3] else seen
        return self._state

    def _look(self) -> tuple[int, int] | None:
        twister = self._twister
        return None if twister is None else (twister.numbers[0], twister.position)

    def _find(self, generator: Any) -> None:
        """Find the state in memory, and see that it is stored there as expected."""
        self._generator, self._twister, self._seen = generator, None, None
        if type(generator).__name__ != np.random.MT19937.__name__:
            return
        found = _Twister.from_address(generator.ctypes.state_address)
        _, numbers, position, *_ = np.random.get_state()
        if found.position == position and bytes(found.numbers) == numbers.tobytes():
            self._twister = found


_numpy = _NumPyGenerator()
