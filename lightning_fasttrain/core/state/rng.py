"""Read and restore the states of random number generators, and the order of samples that seeds determine."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import Dataset

from lightning_fasttrain.core.checks import check_arguments

_OTHER_GPUS = ("mps", "xpu")


@check_arguments
def random_state() -> dict[str, Any]:
    """The state of torch's, Python's and NumPy's generators, and of all GPUs once they are in use.

    Made of tensors, numbers and strings only, so that it loads with ``weights_only=True``.

    Example:
        >>> before = random_state()
        >>> first = torch.rand(3), random.random(), np.random.rand()
        >>> set_random_state(before)
        >>> torch.equal(torch.rand(3), first[0]), random.random() == first[1], np.random.rand() == first[2]
        (True, True, True)
    """
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    with _disable_current_modes():  # under a fake mode, the tensors would have no values
        return {
            **_states_of_torch(),
            "python": (version, torch.from_numpy(np.array(numbers, np.int64)), gauss),  # one by one they load slowly
            "numpy": (numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]),
        }


def _states_of_torch() -> dict[str, Any]:
    # To ask for CUDA's state would start CUDA: memory on each device, and forked processes could not use it.
    every = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": every, **_state_of_other_gpu()}


def _state_of_other_gpu() -> dict[str, Any]:
    """Return the state of the default generator of an Apple or Intel GPU, by the type of the device; {} if none."""
    device = torch.accelerator.current_accelerator()
    if device is None or device.type not in _OTHER_GPUS or not torch.accelerator.is_available():
        return {}
    return {device.type: torch.get_device_module(device).get_rng_state()}


def torch_generators(state: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Return the states of torch's generators, now or in a :func:`random_state`: the CPU's first, then each GPU's."""
    state = _states_of_torch() if state is None else state
    others = [state[name] for name in _OTHER_GPUS if name in state]
    return [state["torch"], *state["cuda"], *others]


@check_arguments
def set_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` returned; of GPUs as many as there are now."""
    with _disable_current_modes():
        _set_random_state(state)


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    if isinstance(numbers, torch.Tensor):  # once they were saved as they are
        numbers = numbers.tolist()
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if state["cuda"] and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
    here = _state_of_other_gpu()
    for name in here.keys() & state.keys():
        torch.get_device_module(name).set_rng_state(state[name])


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the random state at the end of a ``with`` block.

    Example:
        >>> with keep_random_state():
        ...     drawn = torch.rand(1)
        >>> torch.equal(torch.rand(1), drawn)
        True
    """
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


class SeededSamples(Dataset[Any]):
    """Reads each sample with the generators of torch (on the CPU), Python and NumPy seeded by the pass and its index.

    A sample then depends neither on the worker that reads it nor on the samples read before. The generators are
    restored afterwards, so that a loader without workers takes no numbers from training.

    Args:
        inner: a map-style dataset.
        seed: that of the pass over the data.
    """

    def __init__(self, inner: Any, seed: object) -> None:
        self.inner, self.seed = inner, seed
        if callable(getattr(inner, "__getitems__", None)):
            # Set on the object: torch reads samples together if the dataset has this method.
            self.__getitems__ = self._read_several

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for by copy and pickle, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> Any:
        with seeded(f"{self.seed} {index}"):
            return self.inner[index]

    def _read_several(self, indices: list[Any]) -> list[Any]:
        with seeded(f"{self.seed} {indices}"):
            return self.inner.__getitems__(indices)


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """Seed the generators of torch (on the CPU), Python and NumPy by ``text``, and restore them afterwards.

    Example:
        >>> with seeded("epoch 3"):
        ...     first = torch.rand(1)
        >>> with seeded("epoch 3"):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    # torch.manual_seed would seed CUDA too, which training draws from.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
