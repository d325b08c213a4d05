"""Solve a knapsack exactly: the cheapest option for each block within a limit of bytes."""

from collections.abc import Sequence

import numpy as np

MOST = 8192  # candidates kept at once; of more, the cheapest in each interval of bytes


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
    history: list[tuple[np.ndarray, np.ndarray]] = []  # for each block: the option, and the candidate before it
    for choices, limit in zip(options, capacity, strict=True):
        option = np.repeat(np.arange(len(choices)), len(taken))
        before = np.tile(np.arange(len(taken)), len(choices))
        taken = taken[before] + np.array([nbytes for nbytes, _ in choices], dtype=np.int64)[option]
        cost = cost[before] + np.array([ms for _, ms in choices])[option]
        best = _find_unbeaten(taken, cost, limit)
        taken, cost = taken[best], cost[best]
        history.append((option[best], before[best]))
        if not len(taken):
            return None
    result, index = [], len(taken) - 1  # the last takes the most bytes and costs the least
    for option, before in reversed(history):
        result.append(int(option[index]))
        index = before[index]
    return result[::-1]


def _find_unbeaten(taken: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of candidates within ``limit`` that cost less than all smaller ones, in order of bytes."""
    order = np.lexsort((cost, taken))  # by bytes, then by cost: lexsort sorts by the last key first
    order = order[taken[order] <= limit]
    cheapest_so_far = np.minimum.accumulate(cost[order])
    order = order[np.flatnonzero(np.diff(cheapest_so_far, prepend=np.inf) < 0)]  # inf: the first is always kept
    if len(order) > MOST:
        step = taken[order] // (-(-int(taken[order[-1]] + 1) // MOST))
        order = order[np.append(np.diff(step) > 0, True)]  # the last of an interval is its cheapest
    return order
