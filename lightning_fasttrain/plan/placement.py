"""The cheapest choice of one option for each block, within a limit of bytes: a knapsack, solved exactly."""

from collections.abc import Sequence

import numpy as np

LEVELS = 8192  # bytes are counted in so many steps of the limit, rounded to the safe side


def place(options: Sequence[Sequence[tuple[int, float]]], room: Sequence[int]) -> list[int] | None:
    """Choose one option for each block so that the sum of costs is least and the bytes never exceed their room.

        minimise  Σᵢ cost(i, cᵢ)    such that    Σₖ≤ᵢ bytes(k, cₖ) ≤ room(i)  for every i

    The first i blocks have a room of their own because that is what the backward pass of block i + 1 leaves them: what
    the blocks after it kept is free by then. Dynamic programming over bytes, which are rounded up to 1/8192 of the
    largest room; exact but for that.

    Args:
        options: for each block, in the order of the forward, its (bytes, cost) pairs.
        room: for each block, the bytes that it and those before it may take together.

    Returns:
        For each block the index of its option; None if nothing fits.

    Example:
        >>> whole_or_nothing = [(100, 0.0), (0, 3.0)]
        >>> place([whole_or_nothing, [(100, 0.0), (0, 5.0)]], room=[100, 100])
        [1, 0]

    Source:
        Ours. Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
        treat the harder problem in which blocks are recomputed several times.
    """
    everything = sum(max(nbytes for nbytes, _ in choices) for choices in options)
    unit = max(1, -(-min(max(room, default=0), everything) // LEVELS))
    widest = everything // unit + len(options)
    limits = [min(r // unit, widest) for r in room]
    if any(limit < 0 for limit in limits):
        return None
    width = max(limits, default=0) + 1
    cheapest = np.full(width, np.inf)  # by the number of units taken so far
    cheapest[0] = 0.0
    chosen: list[np.ndarray] = []
    for choices, limit in zip(options, limits, strict=True):
        after, choice = np.full(width, np.inf), np.zeros(width, dtype=np.int16)
        for index, (nbytes, cost) in enumerate(choices):
            units = -(-nbytes // unit)
            if units >= width:
                continue
            total = np.full(width, np.inf)
            total[units:] = cheapest[: width - units] + cost
            better = total < after
            after[better], choice[better] = total[better], index
        after[limit + 1 :] = np.inf
        cheapest = after
        chosen.append(choice)
    taken = int(np.argmin(cheapest))
    if not np.isfinite(cheapest[taken]):
        return None
    result: list[int] = []
    for choices, choice in zip(reversed(options), reversed(chosen), strict=True):
        result.append(int(choice[taken]))
        taken -= -(-choices[result[-1]][0] // unit)
    return result[::-1]
