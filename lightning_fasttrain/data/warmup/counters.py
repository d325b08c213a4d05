"""Counts of all the processes of a run."""

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


def sum_over_ranks(counts: list[int], strategy: Strategy | None, world_size: int) -> list[int]:
    """The sums of each of the ``counts`` over all ranks.

    One process asks nobody. Several do it in one small all-reduce, whose result the host waits for: all must go on with
    the same numbers.
    """
    if strategy is None or world_size == 1:
        return counts
    # Exact up to 2^53. float32 ends at 2^24, and a step may hold more tokens than that.
    here = torch.tensor(counts, dtype=torch.float64, device=strategy.root_device)
    total: Tensor = strategy.reduce(here, reduce_op="sum")
    return [int(count) for count in total.tolist()]
