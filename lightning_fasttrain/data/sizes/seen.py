"""How many samples and tokens a run has seen, over all its processes."""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from lightning_fasttrain._counts import count_batch


def count_on_all_ranks(batch: Any, strategy: Strategy, world_size: int) -> tuple[int, int]:
    """Samples and tokens of a batch, as :func:`~lightning_fasttrain._counts.count_batch` counts them, of all ranks.

    One process asks nobody. Several add up in one small all-reduce, whose result the host waits for: all must go on
    with the same numbers.
    """
    samples, tokens = count_batch(batch)
    if world_size == 1:
        return samples, tokens
    here = torch.tensor([samples, tokens], dtype=torch.float64, device=strategy.root_device)
    total: Any = strategy.reduce(here, reduce_op="sum")
    samples, tokens = (int(number) for number in total.tolist())
    return samples, tokens
