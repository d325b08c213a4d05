"""Read and restore the state of every random number generator that a training step may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_fasttrain.core.checks import check_arguments


@check_arguments
def random_state() -> dict[str, Any]:
    """The state of torch's, Python's and NumPy's generators, and of all CUDA devices once CUDA is in use.

    Made of tensors, numbers and strings only, so that it loads with ``weights_only=True``.

    Example:
        >>> before = random_state()
        >>> first = torch.rand(3), random.random(), np.random.rand()
        >>> set_random_state(before)
        >>> torch.equal(torch.rand(3), first[0]), random.random() == first[1], np.random.rand() == first[2]
        (True, True, True)
    """
    # To ask for CUDA's state would start CUDA: memory on each device, and forked processes could not use it.
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),  # 625 numbers, which one by one load slowly
        "numpy": (numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


@check_arguments
def set_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` returned; of CUDA as many devices as there are now."""
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
