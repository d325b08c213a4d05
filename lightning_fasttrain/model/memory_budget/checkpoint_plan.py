"""Printable plan of which blocks are kept and which recomputed, with its costs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning_fasttrain.core.device import GIB, free_bytes
from lightning_fasttrain.core.messages import ReportTable, explain
from lightning_fasttrain.model.memory_budget.block_cost import BlockCost

# Candidates kept at once; of more, the cheapest in each interval of bytes is kept.
MOST = 8192


def place(options: Sequence[Sequence[tuple[int, float]]], capacity: Sequence[int]) -> list[int] | None:
    """Choose one option for each block with the least total cost, so that the bytes never exceed the free bytes.

        minimize  Σᵢ cost(i, cᵢ)    such that    Σₖ≤ᵢ bytes(k, cₖ) ≤ capacity(i)  for every i

    Each prefix of i blocks has its own limit, because the backward of block i + 1 leaves it that many bytes: memory
    of the later blocks is free by then. Dynamic programming, block by block, over the candidates that no other one
    beats in both bytes and cost. For blocks of few sizes there are few, and the result is exact; if there are more than
    8192, the cheapest in each 8192nd of the bytes is kept.

    Args:
        options: for each block, in the order of the forward, its (bytes, cost) pairs.
        capacity: for each block, the bytes that it and the blocks before it may take together.

    Returns:
        The index of the chosen option for each block; None if nothing fits.

    Example:
        >>> whole_or_nothing = [(100, 0.0), (0, 3.0)]
        >>> place([whole_or_nothing, [(100, 0.0), (0, 5.0)]], capacity=[100, 100])
        [1, 0]

    Source:
        Ours. Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
        treat the harder problem in which blocks are recomputed several times.
    """
    taken, cost = np.zeros(1, dtype=np.int64), np.zeros(1)
    # For each block: the option, and the candidate before it.
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for choices, limit in zip(options, capacity, strict=True):
        option = np.repeat(np.arange(len(choices)), len(taken))
        before = np.tile(np.arange(len(taken)), len(choices))
        nbytes, ms = zip(*choices, strict=True)
        taken = taken[before] + np.array(nbytes, dtype=np.int64)[option]
        cost = cost[before] + np.array(ms)[option]
        best = _find_unbeaten(taken, cost, limit)
        taken, cost = taken[best], cost[best]
        history.append((option[best], before[best]))
        if not len(taken):
            return None
    # The last one takes the most bytes and costs the least.
    result, index = [], len(taken) - 1
    for option, before in reversed(history):
        result.append(int(option[index]))
        index = before[index]
    return result[::-1]


def _find_unbeaten(taken: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of candidates within ``limit`` that cost less than all smaller ones, in order of bytes."""
    # The candidates with each option of the last block are sorted already, and a stable sort only merges such runs.
    order = np.argsort(taken, kind="stable")
    order = order[taken[order] <= limit]
    cheapest_so_far = np.minimum.accumulate(cost[order])
    # With inf before it, the first one is always kept.
    order = order[np.flatnonzero(np.diff(cheapest_so_far, prepend=np.inf) < 0)]
    # Of those with equal bytes the last costs the least.
    order = order[np.diff(taken[order], append=np.iinfo(np.int64).max) > 0]
    if len(order) > MOST:
        step = taken[order] // (-(-int(taken[order[-1]] + 1) // MOST))
        # The last of an interval is its cheapest.
        order = order[np.append(np.diff(step) > 0, True)]
    return order


KEPT, SELECTIVE, RECOMPUTED = "kept", "selective", "recomputed"


@dataclass(frozen=True)
class BlockPlan:
    """One block of a :class:`CheckpointPlan`.

    Args:
        name: qualified name of the block.
        action: ``"kept"``, ``"selective"`` or ``"recomputed"``.
        saved_bytes: bytes that the backward needs if everything is kept, without parameters and the block's inputs
            and outputs.
        held_bytes: bytes held between forward and backward under ``action``, besides the inputs.
        forward_ms: duration of the block's forward.
        added_ms: duration of the recomputation.
    """

    name: str
    action: str
    saved_bytes: int
    held_bytes: int
    forward_ms: float
    added_ms: float


@dataclass(frozen=True)
class CheckpointPlan:
    """Choice of recomputed blocks that keeps a step's peak within a limit, at the least extra time.

    Args:
        limit_bytes: limit of the peak.
        blocks: in the order of the forward.
        passes: forward passes in a step: its micro-batches.
        everything_bytes: measured peak of a step with every block recomputed.
        predicted_bytes: predicted peak of a step under the plan.
        measured_bytes: measured peak under the plan, once a step has been run; else None.
        measured_ms: measured time that a step spent in recomputation, likewise; None too if compiled code does it.
    """

    limit_bytes: int
    blocks: tuple[BlockPlan, ...]
    passes: int
    everything_bytes: int
    predicted_bytes: int
    measured_bytes: int | None = None
    measured_ms: float | None = None

    @property
    def predicted_ms(self) -> float:
        """Predicted time that a step spends in recomputation."""
        return self.passes * sum(block.added_ms for block in self.blocks)

    def with_measured(self, nbytes: int, ms: float | None) -> "CheckpointPlan":
        """Return the plan with measurements of a step under it."""
        return replace(self, measured_bytes=nbytes, measured_ms=ms)

    def __str__(self) -> str:
        count = Counter(block.action for block in self.blocks)
        parts = ", ".join(f"{count[action]} {action}" for action in _ACTIONS if count[action])
        peak, ms = f"peak {self.predicted_bytes / GIB:.3g} GiB predicted", f"+{self.predicted_ms:.1f} ms per step"
        if self.measured_bytes is not None:
            peak += f", {self.measured_bytes / GIB:.3g} measured"
        if self.measured_ms is not None:
            ms += f" predicted, +{self.measured_ms:.1f} measured"
        return f"{len(self.blocks)} blocks: {parts} | {peak}, limit {self.limit_bytes / GIB:.3g} | {ms}"

    def table(self) -> ReportTable:
        """Return a table with a row for each block, where runs of equal blocks share a row."""
        numbers = dict.fromkeys(("saves MiB", "holds MiB", "forward ms", "added ms"), "number")
        table = ReportTable(str(self), {"block": "name", "action": "name", **numbers})
        for run in self._runs():
            first, last, n = run[0], run[-1], len(run)
            name = first.name
            if n > 1:
                name += f" … {last.name} ({n})"
            costs = [(block.saved_bytes, block.held_bytes, block.forward_ms, block.added_ms) for block in run]
            saved, held, forward_ms, added_ms = map(sum, zip(*costs, strict=True))
            figures = f"{saved / 2**20:.1f}", f"{held / 2**20:.1f}", f"{forward_ms:.2f}", f"{added_ms:.2f}"
            table.add(name, first.action, *figures)
        return table

    def _runs(self) -> list[list[BlockPlan]]:
        runs: list[list[BlockPlan]] = []
        for block in self.blocks:
            if runs and (runs[-1][-1].action, runs[-1][-1].saved_bytes) == (block.action, block.saved_bytes):
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs


_FIT = 0.92  # of the free memory: the rest is for fragmentation, and for libraries that allocate memory themselves
_ACTIONS = (KEPT, SELECTIVE, RECOMPUTED)


def make_plan(
    costs: Mapping[str, BlockCost],
    peaks: Mapping[str, int],
    limit_bytes: int,
    passes: int,
    aim_bytes: int,
    are_bounds: bool = False,
) -> CheckpointPlan:
    """Return the plan that adds the least time among those whose peak is within a limit.

    Args:
        costs: qualified name → costs of each block, in the order of the forward.
        peaks: with every block recomputed, the highest peak while this block was the last one with its forward done
            and its backward pending; ``""`` for none. In the backward of block i + 1 that is block i, so the peak
            includes the recomputation and the gradients of block i + 1.
        limit_bytes: the user's limit.
        passes: forward passes in a step.
        aim_bytes: limit used for the choice: ``limit_bytes``, or less if an earlier plan exceeded it.
        are_bounds: whether the step may take less than ``peaks``, since it will be compiled.

    Raises:
        ValueError: the highest of ``peaks`` is above the limit, and no bound.
    """
    highest = max(peaks.values())
    if highest > limit_bytes and not are_bounds:
        raise ValueError(explain_excess(highest, limit_bytes))
    choices = list(map(_choices, costs.values()))
    # With zero free bytes every block is recomputed, which holds nothing and so always fits.
    capacity = [max(aim_bytes - peaks.get(name, 0), 0) for name in costs]
    prices = []
    for options in choices:
        prices.append([(held, ms) for _, held, ms in options])
    chosen = place(prices, capacity)
    assert chosen is not None, "recomputing every block is one of the choices, and it fits"
    blocks, held, predicted = [], 0, peaks.get("", 0)
    for (name, cost), options, index in zip(costs.items(), choices, chosen, strict=True):
        action, holds, added = options[index]
        blocks.append(BlockPlan(name, action, cost.saved_bytes, holds, cost.forward_ms, added))
        held += holds
        predicted = max(predicted, peaks.get(name, 0) + held)  # peak(i) + Σₖ≤ᵢ held(k), like the free bytes in `place`
    return CheckpointPlan(limit_bytes, tuple(blocks), passes, highest, predicted)


def explain_excess(least_bytes: int, limit_bytes: int) -> str:
    """Return the message for a limit below what a step takes with every block recomputed."""
    least, short = least_bytes / GIB, (least_bytes - limit_bytes) / GIB
    why = f"a step takes {least:.3g} GiB even with every block recomputed, {short:.2g} GiB above the limit"
    way_out = "Use smaller micro-batches (MicroBatching), a loss without the logits (FusedLossHead, "
    way_out += "linear_cross_entropy), or ActivationOffload"
    return explain(f"MemoryBudget of {limit_bytes / GIB:.3g} GiB", why, way_out)


def _choices(cost: BlockCost) -> list[tuple[str, int, float]]:
    choices = [(KEPT, cost.saved_bytes, 0.0), (RECOMPUTED, 0, cost.forward_ms)]
    if cost.expensive_bytes is not None and cost.expensive_bytes < cost.saved_bytes and cost.cheap_ms < cost.forward_ms:
        choices.append((SELECTIVE, cost.expensive_bytes, cost.cheap_ms))
    return choices


def what_fits(device: torch.device, in_use: int) -> int:
    """Return the bytes that tensors may use on the device, including those that they use now."""
    if device.type == "cuda":
        return int(_FIT * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
    available = free_bytes(device)
    if available is None:
        why = "this system does not report its free memory"
        raise ValueError(explain('budget_gib="fit"', why, "Give the limit in GiB"))
    return int(_FIT * (available + in_use))
