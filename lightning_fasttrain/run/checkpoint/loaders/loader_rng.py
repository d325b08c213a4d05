"""Random number generators of a loader: its own, and those of its samplers and its dataset."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_fasttrain.core.messages import explain

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState | DistributedSampler
# `inner` is the attribute of our own wrapper, `_sampler` that of Lightning's wrapper for distributed sampling.
_HOLDERS = ("inner", "sampler", "batch_sampler", "_sampler", "base_sampler", "dataset", "data_source")
_DEPTH = 5


def generators_of(*holders: object) -> list[Generator]:
    """Return the generators of these objects and of the samplers and datasets inside them, each once, in a fixed order.

    Example:
        >>> data = torch.utils.data.DataLoader(range(4), shuffle=True, generator=torch.Generator())
        >>> generators_of(data) == [data.generator]
        True
    """
    found: dict[int, Generator] = {}
    for holder in holders:
        _look(holder, found, set(), _DEPTH)
    return list(found.values())


def _look(holder: object, found: dict[int, Generator], seen: set[int], depth: int) -> None:
    if depth == 0 or id(holder) in seen or not hasattr(holder, "__dict__"):
        return
    seen.add(id(holder))
    if isinstance(holder, DistributedSampler):
        # A sampler that draws each epoch's order from its own seed acts as a generator.
        found.setdefault(id(holder), holder)
    for name, value in vars(holder).items():
        if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            found.setdefault(id(value), value)
        # Only known names are followed: a dataset may hold anything, such as a model that has generators of its own.
        elif name in _HOLDERS:
            _look(value, found, seen, depth - 1)


def generator_states(*holders: object) -> list[Any]:
    """Return the states of the generators of these objects, in the order of :func:`generators_of`."""
    return list(map(generator_state, generators_of(*holders)))


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator as a tensor, or as plain numbers, lists and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, DistributedSampler):
        return generator.seed
    if isinstance(generator, np.random.Generator):
        # weights_only=True cannot read NumPy arrays, which some of these states hold.
        return _to_plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _to_plain(generator.get_state(legacy=False))
    return generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Restore the state that :func:`generator_state` returned.

    Example:
        >>> for generator in (torch.Generator(), random.Random(3), np.random.default_rng(3), np.random.RandomState(3)):
        ...     state = generator_state(generator)
        ...     draw = lambda: torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else (
        ...         generator.random())
        ...     first = draw()
        ...     set_generator_state(generator, state)
        ...     assert first == draw()
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, DistributedSampler):
        generator.seed = state
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))  # setstate accepts only a tuple


def restore_generators(generators: list[Generator], states: list[Any]) -> None:
    """Restore the states of generators, of which there must be as many.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(generators) != len(states):
        what = f"expected {len(generators)} generator states for a loader, got {len(states)} from the checkpoint"
        why = "the loader, its sampler or its dataset has changed"
        raise ValueError(explain(what, why, "Make the loader as in the saved run"))
    for generator, state in zip(generators, states, strict=True):
        set_generator_state(generator, state)


def _to_plain(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
