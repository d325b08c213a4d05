"""Divide the states that the ranks of a saved run have left over another number of ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.state.rng import random_state, seeded
from lightning_fasttrain.run.checkpoint.gathered_states import unpack

_NOTHING = {"max": -math.inf, "min": math.inf}  # by Lightning's reduce_fx; otherwise 0


def divide_states(saved: Sequence[Tensor], rank: int, world_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state of a rank, and those of further saved ranks whose metrics it continues.

    With fewer ranks than before, rank r continues the metrics of the saved ranks r, r + world_size, and so on, so that
    sums over all ranks stay the same, and the random state of the first of them. An additional rank begins with empty
    metrics and a random state of its own.

    Args:
        saved: the states of all ranks of the saved run, as ``pack`` returned them.
        rank: this rank, of ``world_size``.
    """
    mine = unpack(saved[rank % len(saved)])
    for entry in mine["logged"].values():
        # A single process does not save whether its values are to be reduced over ranks.
        entry["sync"][0] = world_size > 1 and (entry["sync"][0] or len(saved) == 1)
    if rank < len(saved):
        return mine, list(map(unpack, saved[rank + world_size :: world_size]))
    logged = {key: {**entry, "sums": _empty(entry)} for key, entry in mine["logged"].items()}
    with seeded(f"{mine['random']['torch'].sum()} {rank}"):
        random = {**random_state(), "cuda": mine["random"]["cuda"]}
    return {**mine, "random": random, "logged": logged, "metrics": {}}, []


def _empty(entry: dict[str, Any]) -> dict[str, Tensor]:
    nothing = _NOTHING.get(entry["meta"]["reduce_fx"], 0)
    return {name: torch.full_like(value, nothing) for name, value in entry["sums"].items()}
