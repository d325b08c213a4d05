"""Groups in which every pair meets: one run for all the pairs of a group, instead of one run for each pair."""

import itertools
from collections.abc import Callable, Set

Pair = tuple[int, int]
Group = tuple[int, ...]


def cover_pairs(
    count: int,
    fits: Callable[[Group], bool],
    shows: Callable[[Group, Pair], bool],
    size: int,
    costly: Set[int] = frozenset(),
) -> list[Group]:
    """Return groups of at most ``size`` of the numbers below ``count``, so that a group shows every pair that fits.

    A group begins with a pair that no group shows yet, and takes in whichever number brings the most such pairs.

    Args:
        fits: whether these can be one group.
        shows: whether a group that holds a pair would show what is wrong with it.
        costly: the numbers whose pairs come first, so that few groups hold them.
    """
    left = [pair for pair in itertools.combinations(range(count), 2) if fits(pair)]
    left.sort(key=lambda pair: costly.isdisjoint(pair))
    groups = []
    while left:
        waiting, group = set(left), left[0]

        def newly_shown(group: Group, waiting: set[Pair] = waiting) -> list[Pair]:
            return [pair for pair in itertools.combinations(group, 2) if pair in waiting and shows(group, pair)]

        while len(group) < size:
            grown = [tuple(sorted((*group, number))) for number in range(count) if number not in group]
            best = max(filter(fits, grown), key=lambda group: len(newly_shown(group)), default=group)
            if len(newly_shown(best)) <= len(newly_shown(group)):
                break
            group = best
        groups.append(group)
        shown = set(newly_shown(group))
        left = [pair for pair in left if pair not in shown]
    return groups
