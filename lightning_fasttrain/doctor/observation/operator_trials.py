"""Time an operator of the run a second time with a change, on copies, to measure what a cure would bring."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.device import device_clock
from lightning_fasttrain.doctor.observation.operator_changes import Change, find_changes
from lightning_fasttrain.doctor.observation.source_lines import Call, find_call


@dataclass
class Trial:
    """Times of one operator with arguments of one shape, as it is and changed.

    Attributes:
        cure: name of the change.
        call: where it was called from first.
        base_ms: the time as it is, between the two others.
        changed_ms: the times with the change.
        count: how often it ran in the step.
    """

    cure: str
    call: Call
    base_ms: float
    changed_ms: list[float]
    count: int = 1


@dataclass
class OperatorTrials:
    """Tries each change once for each operator and shape, and counts how often each of them runs.

    Attributes:
        trials: what was tried.
        budget_s: seconds that are left; nothing new is tried afterwards.
        left_out: number of operators that were not tried because of it, by the name of the change.
        failed: what could not run with its change, for lack of memory or of a kernel.
    """

    trials: dict[tuple[object, ...], Trial] = field(default_factory=dict)
    budget_s: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    failed: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, func: object, args: object, kwargs: object) -> None:
        """Time the operator as it is and changed, for each change that applies to it."""
        for change in find_changes(func, args):
            key = (change.cure, func, *_signature(args))
            if key in self.trials:
                self.trials[key].count += 1
            elif self.budget_s <= 0:
                self.left_out[change.cure] += 1
            elif key not in self.failed:
                self._try(key, change, func, args, kwargs)

    def _try(self, key: tuple[object, ...], change: Change, func: object, args: object, kwargs: object) -> None:
        began = perf_counter()
        try:
            self.trials[key] = _time_both(change, func, args, kwargs)
        except Exception:  # the training continues without it
            self.failed.add(key)
        self.budget_s -= perf_counter() - began


def _time_both(change: Change, func: Any, args: object, kwargs: Any) -> Trial:
    changed = tree_map(lambda leaf: change.of_tensor(leaf) if isinstance(leaf, Tensor) else leaf, args)
    with change.within():
        if change.searches:
            func(*changed, **kwargs)
        # First what is changed, which so pays for caches and for loading kernels.
        first_ms = _time(func, changed, kwargs)
    base_ms = _time(func, args, kwargs)
    with change.within():
        changed_ms = [first_ms, _time(func, changed, kwargs)]
    return Trial(change.cure, find_call(sys._getframe()), base_ms, changed_ms)


def _time(func: Any, args: Any, kwargs: Any) -> float:
    device = next(leaf.device for leaf in args if isinstance(leaf, Tensor))
    began = device_clock(device)
    func(*args, **kwargs)
    return 1e3 * (device_clock(device) - began)


def _signature(args: Any) -> list[object]:
    described: list[object] = []
    for leaf in args:
        described.append((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf))
    return described
