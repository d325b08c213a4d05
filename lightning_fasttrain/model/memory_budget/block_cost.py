"""Measure the bytes that a block saves for the backward and its forward time, in total and without expensive ops."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy as Keep

from lightning_fasttrain.core.device import DeviceTimer
from lightning_fasttrain.core.distributed import largest_over_ranks
from lightning_fasttrain.core.modules.parameters import device_of
from lightning_fasttrain.core.modules.recomputation import without_graph
from lightning_fasttrain.model.activation_checkpointing import CheckpointedForward

_REPEATS = 2  # timed runs; the fastest counts
# Minimum fraction of the forward that is recomputed; differences of noisy times may be meaningless.
_LEAST = 0.05


@dataclass(frozen=True)
class BlockCost:
    """Costs of one call of a block.

    Args:
        saved_bytes: storages that autograd keeps, without parameters and the block's inputs and outputs.
        expensive_bytes: results of the expensive operations, without the block's outputs; None if they cannot be
            kept, because the block changes one in place.
        forward_ms: duration of the forward, which recomputing the block adds.
        cheap_ms: duration of the recomputation if the expensive results are kept, including the overhead of keeping
            them.
    """

    saved_bytes: int
    expensive_bytes: int | None
    forward_ms: float
    cheap_ms: float

    def times(self, calls: int) -> "BlockCost":
        """Return the costs of a block that is called ``calls`` times in one forward of the model."""
        expensive = None if self.expensive_bytes is None else calls * self.expensive_bytes
        return BlockCost(calls * self.saved_bytes, expensive, calls * self.forward_ms, calls * self.cheap_ms)

    def with_bytes(self, share: float) -> "BlockCost":
        """Return the costs of a block that saves this share of the bytes."""
        expensive = None if self.expensive_bytes is None else round(share * self.expensive_bytes)
        return replace(self, saved_bytes=round(share * self.saved_bytes), expensive_bytes=expensive)

    def at_least(self, other: "BlockCost") -> "BlockCost":
        """Return the larger of both in every cost, which holds for the batches of both."""
        a, b = self.expensive_bytes, other.expensive_bytes
        expensive = None if a is None or b is None else max(a, b)
        return BlockCost(
            max(self.saved_bytes, other.saved_bytes),
            expensive,
            max(self.forward_ms, other.forward_ms),
            max(self.cheap_ms, other.cheap_ms),
        )


def measure_block(
    forward: CheckpointedForward,
    keeps: Callable[..., Keep],
    fixed: "Storages",
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> BlockCost:
    """Run a block's forward a few times beside the training, without side effects.

    Args:
        forward: the replacement of the block's ``forward``.
        keeps: decides which operations are expensive.
        fixed: storages that do not count: those of the model's parameters and buffers. Those of the block itself, which
            are gathered for its forward alone where they are sharded, do not count either.
        args, kwargs: arguments of the call.

    Returns:
        Its costs. On CUDA this waits for the device.
    """
    saved = Storages()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return without_graph(tensor)

    def run() -> Any:
        with forward.leaving_no_trace():
            return forward.inner(*args, **kwargs)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()
    # Inputs and outputs are held for the adjacent blocks too, whichever action this block gets.
    own = *forward.module.parameters(), *forward.module.buffers()
    saved_bytes = saved.nbytes(fixed, Storages(*own, args, kwargs, outputs))
    del outputs
    device = device_of(forward.module)
    whole, watched, expensive = [], [], []
    expensive_bytes, is_spoilt = 0, False
    for _ in range(_REPEATS):
        timer = DeviceTimer(device)
        with timer.measure():
            run()
        whole.append(timer.ms())
        timer, of_expensive = DeviceTimer(device), DeviceTimer(device)
        mode = KeptResults(keeps, of_expensive.measure)
        with timer.measure(), mode:
            outputs = run()
        watched.append(timer.ms())
        expensive.append(of_expensive.ms())
        expensive_bytes, is_spoilt = mode.kept.nbytes(Storages(outputs)), mode.spoilt
        del outputs
    forward_ms = min(whole)  # other load on the machine only adds time
    # For keeping in the forward and returning in the recomputation.
    handling = 2 * max(min(watched) - forward_ms, 0.0)
    cheap_ms = max(forward_ms - min(expensive) + handling, _LEAST * forward_ms)
    return BlockCost(saved_bytes, None if is_spoilt else expensive_bytes, forward_ms, cheap_ms)


def costs_over_ranks(
    costs: Mapping[str, BlockCost], peaks: Mapping[str, int]
) -> tuple[dict[str, BlockCost], dict[str, int]]:
    """Return costs and peaks that hold for every process, so that all of them make the same plan."""
    # More than any block: survives the maximum, so that if one process cannot keep it, none does.
    spoilt = float(2**60)
    flat = [float(peaks.get(name, 0)) for name in ("", *costs)]
    for cost in costs.values():
        expensive = spoilt if cost.expensive_bytes is None else cost.expensive_bytes
        flat += [cost.saved_bytes, expensive, cost.forward_ms, cost.cheap_ms]
    highest = iter(largest_over_ranks(flat))
    all_peaks = dict(zip(("", *costs), map(int, highest), strict=False))
    all_costs = {}
    for name in costs:
        saved, expensive, forward_ms, cheap_ms = islice(highest, 4)
        all_costs[name] = BlockCost(int(saved), None if expensive == spoilt else int(expensive), forward_ms, cheap_ms)
    return all_costs, all_peaks


class Storages:
    """A set of storages, held weakly: they may be freed, but their identities are not reused.

    Args:
        nested: tensors, or containers of tensors, whose storages are in the set; other values are ignored.
    """

    def __init__(self, *nested: object) -> None:
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.add(*nested)

    def add(self, *nested: object) -> None:
        for storage in _storages_of(nested):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def has(self, nested: object) -> bool:
        """Check whether one of the tensors is in the set."""
        return any(storage._cdata in self._sizes for storage in _storages_of(nested))

    def nbytes(self, *without: "Storages") -> int:
        """Return the bytes of the storages that are in none of the sets ``without``."""
        total = 0
        for key, (_, nbytes) in self._sizes.items():
            if not any(key in others._sizes for others in without):
                total += nbytes
        return total


def _storages_of(nested: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_iter(nested):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            # A subclass that wraps other tensors has none of its own.
            with suppress(NotImplementedError, RuntimeError):
                yield leaf.untyped_storage()


class KeptResults(TorchDispatchMode):
    """Records the results that a policy keeps.

    Args:
        keeps: the policy.
        measure: a context in which each operation runs whose result is kept.

    Attributes:
        kept: storages of the results.
        spoilt: whether a kept result was changed in place, so that a recomputation would get the changed one.
    """

    def __init__(self, keeps: Callable[..., Keep], measure: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.keeps, self.measure = keeps, measure
        self.kept = Storages()
        self.spoilt = False

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.keeps(None, func, *args, **kwargs) is not Keep.MUST_SAVE:
            if func._schema.is_mutable and self.kept.has(args):
                self.spoilt = True
            return func(*args, **kwargs)
        with self.measure():
            out = func(*args, **kwargs)
        self.kept.add(out)
        return out
