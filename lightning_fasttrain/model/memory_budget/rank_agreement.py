"""Values that hold for every process of a distributed run, so that all make the same decision."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.model.memory_budget.block_cost import BlockCost


def highest_of_all(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum over all processes; all processes must call it."""
    if rank_count() == 1:
        return list(numbers)
    # Exact for bytes up to 2**53.
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def for_all(
    costs: Mapping[str, BlockCost], peaks: Mapping[str, int], device: torch.device
) -> tuple[dict[str, BlockCost], dict[str, int]]:
    """Return costs and peaks that hold for every process, so that all of them make the same plan."""
    # More than any block: survives the maximum, so that if one process cannot keep it, none does.
    spoilt = float(2**60)
    flat = [float(peaks.get(name, 0)) for name in ("", *costs)]
    for cost in costs.values():
        expensive = spoilt if cost.expensive_bytes is None else cost.expensive_bytes
        flat += [cost.saved_bytes, expensive, cost.forward_ms, cost.cheap_ms]
    highest = iter(highest_of_all(flat, device))
    all_peaks = {name: int(next(highest)) for name in ("", *costs)}
    all_costs = {}
    for name in costs:
        saved, expensive, forward_ms, cheap_ms = (next(highest) for _ in range(4))
        all_costs[name] = BlockCost(int(saved), None if expensive == spoilt else int(expensive), forward_ms, cheap_ms)
    return all_costs, all_peaks
